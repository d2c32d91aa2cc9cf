"""The table of readers of input files. The ending of a file's name selects the reader of the file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from optimus.plugins import Imported, Table


@dataclass(frozen=True)
class ReaderRow:
    """A reader of the files whose names end in one of `suffixes`, in upper or lower case. `suffixes` are in lower case.

    `read(source, start, text_field, encode)` yields the batches and pieces of a file from a position on; see
    `data.documents`. `documents.record_reader` makes a row from a function that yields records.
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
            "table": "optimus.data.documents:TABLE",
            "parquet": "optimus.data.documents:PARQUET",
            "arrow": "optimus.data.documents:ARROW",
        }
    ),
)


def suffixes() -> tuple[str, ...]:
    """Returns the endings of all files that some reader reads."""
    return tuple(suffix for row in READERS.values() for suffix in row.suffixes)
