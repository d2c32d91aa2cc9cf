"""The form of every benchmark's result: a table for people, JSON for programs."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimus.disk import write_json
from optimus.observe.machine import describe_machine, versions

_FILE_WIDTH = 220  # characters of a table that no terminal limits


def report(
    name: str, rows: Sequence[dict[str, Any]], ratios: dict[str, float], more: Mapping[str, Any] | None = None
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
    ratios: dict[str, float],
    *,
    path: Path | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print the table and the ratios, and write the report to `path` if there is one."""
    print_table(rows, f"optimus bench {name}")
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    if path is not None:
        write_json(path, report(name, rows, ratios, more))


def print_table(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print rows of equal keys as a table."""
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
