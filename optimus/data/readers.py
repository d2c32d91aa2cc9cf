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

    `divide(source, share)` returns a `Position.offset` near this share of the file, where `read` can begin and end; None
    for the end of the file. `read` then takes `stop`, the offset where it ends, as its fifth argument.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[..., Iterator[Any]]
    divide: Callable[[Any, float], int | None] | None = None


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
