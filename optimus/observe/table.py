"""Prints tables for people."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_NO_WRAP = 12  # cells of at most this many characters, such as "46.1 %", stay on one line
_NO_LIMIT = 100_000  # width in characters that stands for no limit, as in a file


class _Column(NamedTuple):
    head: str
    is_text: bool
    cells: tuple[str, ...]


def print_table(rows: Sequence[dict[str, Any]], title: str, width: int | None = None) -> None:
    """Prints rows as a table with a column for each key.

    The table is compact if `width`, the maximum number of characters, is given, or if the full table is wider than the
    terminal. Several rows that are still too wide lose columns with equal cells, except the first column; a line above
    the table has these cells. Then longer texts wrap. Rows that fit in no table become lines of key and value.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else _NO_LIMIT)
    max_width = min(console.width, width or _NO_LIMIT)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    columns = [
        _Column(
            key.replace("_", " "),
            any(isinstance(row.get(key), str) for row in rows),
            tuple(_cell(row.get(key)) for row in rows),
        )
        for key in keys
    ]

    def write(line: str, style: str = "") -> None:
        """Prints a line, and leaves the wrapping to the terminal."""
        console.print(Text(line, style=style), soft_wrap=True)

    write(title, "italic")
    table = _natural(columns, max_width, compact=width is not None) or _natural(columns, max_width, compact=True)
    if table is None and len(rows) > 1:
        same = [column for column in columns[1:] if len(set(column.cells)) == 1]
        columns = [column for column in columns if column not in same]
        if same:
            write("in all rows: " + "; ".join(f"{column.head} {column.cells[0]}" for column in same))
    table = table or _wrapped(columns, max_width)
    if table is not None:
        console.print(table)
        return
    margin = max(len(column.head) for column in columns)
    for first, *others in zip(*([(column.head, cell) for cell in column.cells] for column in columns)):
        write(" ".join(first).strip(), "bold")
        for head, cell in others:
            write(f"  {head:<{margin}}  {cell}")


def _natural(columns: list[_Column], max_width: int, *, compact: bool) -> Any:
    """Returns the table with every cell on one line, or None if the table is wider than `max_width` characters."""
    table = _table(columns, _widths(columns), compact=compact)
    return table if _measured(table) <= max_width else None


def _wrapped(columns: list[_Column], max_width: int) -> Any:
    """Returns the compact table with columns not narrower than `_least`; None if `max_width` characters are too few."""
    widths = _widths(columns)
    excess = _measured(_table(columns, widths, compact=True)) - max_width
    spare = [width - _least(column) for width, column in zip(widths, columns)]
    if excess > sum(spare):
        return None
    for _ in range(excess):
        at = max((at for at in range(len(widths)) if spare[at]), key=widths.__getitem__)
        widths[at] -= 1
        spare[at] -= 1
    return _table(columns, widths, compact=True)


def _table(columns: list[_Column], widths: list[int], *, compact: bool) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    form: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False} if compact else {}
    table = Table(**form)
    for column, width in zip(columns, widths):
        table.add_column(Text(column.head), justify="left" if column.is_text else "right", width=width)
    for row in zip(*(column.cells for column in columns)):
        table.add_row(*map(Text, row))  # rich would parse [words] in a plain string as markup
    return table


def _measured(table: Any) -> int:
    from rich.console import Console

    return Console(width=_NO_LIMIT).measure(table).maximum


def _widths(columns: list[_Column]) -> list[int]:
    from rich.cells import cell_len

    return [max(map(cell_len, (column.head, *column.cells))) for column in columns]


def _least(column: _Column) -> int:
    """Returns the smallest width that breaks no word, no number and no short text."""
    from rich.cells import cell_len

    parts = column.head.split()
    for cell in column.cells:
        parts += cell.split() if column.is_text and cell_len(cell) > _NO_WRAP else [cell]
    return max(map(cell_len, parts), default=0)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
