"""The table of readers of input files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from optimus.plugins import Imported, Table


@dataclass(frozen=True)
class ReaderRow:
    """A reader of the files whose names end in one of `suffixes`. The suffixes must be in lower case.

    `read(source, start, text_field, encode)` yields batches or pieces of the file `source` from position `start` on.
    `documents.record_reader` makes a row from a function that yields records.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[..., Iterator[Any]]


READERS: Table[ReaderRow] = Table(
    "reader",
    ReaderRow,
    lambda: Imported(
        {
            "text": "optimus.data.documents:TEXT",
            "html": "optimus.data.documents:HTML",
            "json-lines": "optimus.data.documents:JSON_LINES",
            "json": "optimus.data.documents:JSON",
            "table": "optimus.data.documents:TABLE",
            "parquet": "optimus.data.documents:PARQUET",
            "arrow": "optimus.data.documents:ARROW",
        }
    ),
)


def suffixes() -> tuple[str, ...]:
    """Returns the file name endings of all readers."""
    return tuple(suffix for row in READERS.values() for suffix in row.suffixes)
