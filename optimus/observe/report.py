"""The form of every benchmark's result: a table for people, JSON for programs."""

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
    """`{"bench", "machine", "versions", "rows", "ratios"}`, and what is in `more`."""
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
    """Print the table and the ratios, of which those that are None do not exist; returns the report."""
    print_table(rows, f"optimus bench {name}")
    for ratio, value in ratios.items():
        print(f"{ratio}: {'-' if value is None else f'{value:.3g}'}")
    return report(name, rows, ratios, more)
