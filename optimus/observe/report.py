"""The common format of benchmark results."""

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
    """Returns a benchmark's results as a dict, with the machine, package versions and the entries of `more`."""
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
    """Prints `rows` as a table and then `ratios`, and returns the result of `report`."""
    print_table(rows, f"optimus bench {name}")
    for ratio, value in ratios.items():
        print(f"{ratio}: {'-' if value is None else f'{value:.3g}'}")
    return report(name, rows, ratios, more)
