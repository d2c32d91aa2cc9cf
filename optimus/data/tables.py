"""Reads the records of a CSV or TSV file. The first row that is not empty names the columns.

Cells in quotes may contain delimiters and line breaks (RFC 4180).
"""

import csv
import io
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from optimus.data.fields import TextField
from optimus.errors import UserError

LONGEST_CELL = 64 << 20  # maximum number of characters of a cell
_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}


def records(stream: BinaryIO, where: str, field: TextField, delimiter: str) -> Iterator[dict[str, str]]:
    """Yields, for each row, the cells of the columns that `field` needs, by name.

    Raises `UserError` for a missing column, a bad row, or text that is not UTF-8.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))  # a global limit of the module `csv`
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rows = csv.reader(_lines(text), delimiter=delimiter, strict=True)
    try:
        header = next(filter(None, rows), [])
        number, first = rows.line_num, next(rows, [])
        other = next((each for each in _DELIMITERS if each != delimiter and each in "".join(header)), None)
        if (
            len(header) == 1
            and other
            and len(next(csv.reader(header, delimiter=other))) > 1
            and header[0] not in field.names
        ):
            cure = {",": "Rename it to .csv", "\t": "Rename it to .tsv"}.get(other, "Save it with commas")
            raise UserError(
                f"{where}:{number}: {_DELIMITERS[other]} separate its columns, not {_DELIMITERS[delimiter]}. {cure}."
            )
        columns = field.columns(header, where, lambda: dict(zip(header, first))) if header else []
        for row in chain([first], rows):
            if not row:
                continue
            if len(row) != len(header):
                raise UserError(
                    f"{where}:{rows.line_num}: a row of {len(row)} cells, but the first has {len(header)}. Quote cells that "
                    "contain the delimiter or a line break."
                )
            yield {name: row[header.index(name)] for name in columns}
    except csv.Error as error:
        raise UserError(
            f"{where}:{rows.line_num}: not readable as a table ({error}). Check for an unclosed quote."
        ) from error
    except UnicodeDecodeError as error:
        # `rows` has already read all lines that end before the chunk `error.object`.
        line = rows.line_num + error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{where}:{line}: not UTF-8 ({error.reason}). Convert it to UTF-8.") from error


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    """Yields the lines of `text`, and raises `csv.Error` for a line of `LONGEST_CELL` characters or more."""
    while line := text.readline(LONGEST_CELL):
        if len(line) == LONGEST_CELL:
            raise csv.Error(f"a line of {LONGEST_CELL >> 20} MB or more")
        yield line
