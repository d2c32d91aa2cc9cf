"""Records the progress of an unfinished `prepare` in the folder `<output>.partial`.

`prepare` must sync the token stream to disk before the journal counts the stream's tokens.
"""

import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optimus.data.contamination import Contamination, DocumentScan
from optimus.data.documents import Position
from optimus.data.files import BadFile, Sources
from optimus.data.selection import Document
from optimus.data.shards import EARLIER
from optimus.disk import parse_json, write_json
from optimus.errors import UserError

FILE = "journal.json"
LOCK = ".lock"
FILES = "files"  # the setting that identifies the input files of all tasks
_TRIES = 5  # attempts to lock, as another process may be looking
# Fields of `Counts`: reasons to exclude a document.
EXCLUSIONS = ("too_short", "too_long", "contaminated", "duplicates")


@dataclass
class Counts:
    """Counts of the documents that `prepare` has read from one input. `documents`, `text_bytes` and `tokens` count only
    the included documents."""

    documents: int = 0
    empty_documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    too_short: int = 0  # number of excluded documents, as in the next three fields
    too_long: int = 0
    contaminated: int = 0
    duplicates: int = 0

    @property
    def documents_read(self) -> int:
        """Number of documents, also empty and excluded ones."""
        return self.documents + self.empty_documents + sum(getattr(self, name) for name in EXCLUSIONS)


@dataclass
class Mark:
    """A position that reading can resume from.

    `files` identifies the files read, wholly or partly, up to the position. `document` describes a document that
    continues at the position. `contamination` has the examples of contaminated documents: `input` is the number of their
    input, and `document` counts the documents of the input that this task reads, from 1.
    """

    position: Position
    counts: list[Counts]  # one entry per input
    files: str = ""
    document: Document = field(default_factory=Document)
    contamination: Contamination = field(default_factory=Contamination)

    @property
    def tokens(self) -> int:
        return sum(counts.tokens for counts in self.counts) + self.document.tokens

    @property
    def documents(self) -> int:
        """Number of complete documents in the stream."""
        return sum(counts.documents for counts in self.counts)

    def holds(self, sources: Sources) -> bool:
        """Returns True if the files read up to the position are still the same."""
        read = self.position.files_read
        return read <= len(sources.files) and sources.identity_digests[read] == self.files


@dataclass
class Journal:
    """The state of an unfinished `prepare`. `mark` is the last position that reading can resume from, and `file_mark`
    is the last such position at the beginning or end of a file."""

    settings: dict[str, Any]
    mark: Mark
    file_mark: Mark
    complete: bool = False  # True if the mark is at the end of the inputs
    read: float = 0.0  # share of the inputs before the mark
    looked_at: str = ""  # identity digest of the files that passed the check
    bad: list[BadFile] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if deleting the journal loses no tokens."""
        return not self.complete and not self.mark.tokens

    def write(self, folder: Path) -> None:
        content = asdict(self)
        write_json(folder / FILE, content | {"crc": _sum(content)})


def read(folder: Path) -> Journal | None:
    """Reads the journal in `folder`, or returns None if there is none. Raises `UserError` for a damaged journal."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        stored = parse_json(path.read_bytes())
        if stored.pop("crc") != _sum(stored):
            raise ValueError("its checksum is wrong")
        for name in ("mark", "file_mark"):
            mark = stored[name]
            counts = [Counts(**count) for count in mark["counts"]]
            document = Document(**mark.get("document", {}))
            if isinstance(document.scan, dict):  # absent in a journal of an earlier version
                document.scan = DocumentScan(**document.scan)
            contamination = Contamination(**mark.get("contamination", {}))
            stored[name] = Mark(Position(*mark["position"]), counts, mark["files"], document, contamination)
        stored["bad"] = [BadFile(**bad) for bad in stored.get("bad", ())]
        return Journal(**stored)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}). Delete {folder} and run again.") from error


def _sum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describes the settings in `now` that differ from `before`."""
    before = {**EARLIER, **before}
    digests = {
        "inputs": "other input files",
        FILES: "other input files",
        "exclude": "other evaluation sets (`exclude`)",
    }
    return ", ".join(
        digests.get(name, f"{name} {before.get(name)} there and {now[name]} here")
        for name in now
        if before.get(name) != now[name]
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates `folder` if it is absent, and holds its lock. Raises `UserError` if another run holds the lock or
    has just finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in reversed(range(_TRIES)):
        with held(folder) as lock:
            if lock:
                yield
                return
        if left:
            time.sleep(0.1)
    raise UserError(f"another run uses {folder}. Wait for its end, or choose another `output`.")


@contextmanager
def held(folder: Path, shared: bool = False) -> Iterator[bool]:
    """Holds the lock of `folder`, with other readers if `shared`. Yields False if another process holds it, or has
    finished its work in the folder."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # The process that held the lock may have finished and deleted the file since this process opened it.
        yield os.fstat(file.fileno()).st_nlink > 0
