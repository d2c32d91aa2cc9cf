"""Tables for people."""

import sys
from collections.abc import Sequence
from typing import Any

_FILE_WIDTH = 220  # characters of a table that no terminal limits


def print_table(rows: Sequence[dict[str, Any]], title: str, width: int | None = None) -> None:
    """Print rows of equal keys as a table; with a `width` in at most so many characters, and with fewer lines."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    form: dict[str, Any] = {} if width is None else {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    table = Table(title=title, title_justify="left", **form)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    console.print(table, width=None if width is None else min(width, console.width))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
