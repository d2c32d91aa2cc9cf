"""The common format of benchmark results: a table for people, JSON for programs."""

from collections.abc import Mapping, Sequence
from typing import Any

from optimus.observe.machine import describe_machine, versions
from optimus.observe.table import print_table

__all__ = ["print_table", "publish", "report"]


def report(
    name: str,
    rows: Sequence[dict[str, Any]],
    ratios: Mapping[str, float | None],
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns `{"bench", "machine", "versions", "rows", "ratios"}`, extended by `more`."""
    return {
        "bench": name,
        "machine": describe_machine(),
        "versions": versions("transformers", "tokenizers", "numpy", "triton"),
        "rows": list(rows),
        "ratios": ratios,
        **(more or {}),
    }


def publish(
    name: str,
    rows: Sequence[dict[str, Any]],
    ratios: Mapping[str, float | None],
    *,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Prints the table and the ratios, with "-" for None, and returns the report."""
    print_table(rows, f"optimus bench {name}")
    for ratio, value in ratios.items():
        print(f"{ratio}: {'-' if value is None else f'{value:.3g}'}")
    return report(name, rows, ratios, more)
