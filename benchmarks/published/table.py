"""The published tables as rows of typed cells.

An invalid cell raises `UserError`. A missing fact raises `Inexpressible`, whose reason goes to the list of exclusions.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from optimus.errors import UserError

_ALWAYS = ("row_id", "model", "gpu")
_NUMBER = re.compile(r"~?\s*(\d[\d,]*(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([kKMB]?)")
_SCALE = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}


class Inexpressible(Exception):
    """Raised for a row that is no case; `str(error)` is the reason in the list of exclusions."""


@dataclass(frozen=True)
class Row:
    """A line of a table. Columns that a file lacks are empty, because its sources did not state them."""

    path: Path
    cells: dict[str, str]

    @property
    def name(self) -> str:
        """Returns the `row_id`."""
        return self.cells["row_id"]

    def text(self, column: str) -> str:
        """Returns the cell, or ''."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """Returns the cell's number, or None for an empty cell. Raises `UserError` for a cell that is no number."""
        text = self.text(column)
        if not text:
            return None
        found = _NUMBER.fullmatch(text)
        if found is None:
            raise UserError(
                f"{self.path}, row {self.name}, column {column}: '{text}' is no number; correct it or empty it"
            )
        return float(found[1].replace(",", "")) * _SCALE[found[2]]

    def integer(self, column: str) -> int | None:
        """Returns the cell's whole number, or None for an empty cell. Raises `UserError` for any other cell."""
        number = self.number(column)
        if number is not None and number != int(number):
            raise UserError(
                f"{self.path}, row {self.name}, column {column}: {self.text(column)} is not whole; correct it"
            )
        return None if number is None else int(number)

    def size(self, column: str, default: int | None = None) -> int:
        """Returns a whole number of at least one; `default` for an empty cell.

        Raises `Inexpressible` without either, and `UserError` for a number below one.
        """
        value = self.integer(column)
        value = default if value is None else value
        if value is None:
            raise Inexpressible(f"{column} is not stated")
        if value < 1:
            raise UserError(f"{self.path}, row {self.name}, column {column}: {value} is less than 1; correct it")
        return value

    def flag(self, column: str) -> bool:
        """Returns whether the cell means yes."""
        return self.text(column).lower() in ("yes", "true", "y", "on")


def read_table(path: Path) -> list[Row]:
    """Returns the rows of a file. Raises `UserError` if a required column is missing or a name occurs twice."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header, lines = list(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}. Give the folder with the published tables") from error
    missing = [column for column in _ALWAYS if column not in header]
    if missing:
        raise UserError(f"{path}: no column {', '.join(missing)}; its first line must name the columns")
    rows, names = [], set[str]()
    for number, line in enumerate(lines, start=2):
        if None in line or None in line.values():
            raise UserError(f"{path}, line {number}: not as many cells as the first line names; correct it")
        row = Row(path, {column: cell.strip() for column, cell in line.items()})
        if not row.name or row.name in names:
            raise UserError(
                f"{path}, line {number}, column row_id: '{row.name}' is empty or there twice; name each row"
            )
        names.add(row.name)
        rows.append(row)
    return rows
