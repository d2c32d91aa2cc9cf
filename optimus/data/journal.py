"""How far an unfinished `prepare` has come: a small file, replaced atomically, in the folder `<output>.partial`.

What the journal says is on disk is on disk: the token stream is synchronised before the journal that counts it. So
after a kill at any moment the stream goes on from the journal's length and reading from the journal's position.
"""

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optimus.data.documents import Position
from optimus.data.files import BadFile, Sources
from optimus.data.selection import Document
from optimus.data.shards import EARLIER
from optimus.disk import parse_json, write_json
from optimus.errors import UserError

FILE = "journal.json"
LOCK = ".lock"
LEFT_OUT = ("too_short", "too_long", "duplicates")  # why documents are: names of `Counts`


@dataclass
class Counts:
    """What has been read from one input."""

    documents: int = 0
    empty_documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    too_short: int = 0  # documents left out, as the next two
    too_long: int = 0
    duplicates: int = 0


@dataclass
class Mark:
    """A place that reading can resume from: everything before `position` gave the first `tokens` of the stream.

    `files` says which files were read, wholly or partly, up to here, and `document` what is known of one that goes on there.
    """

    position: Position
    counts: list[Counts]  # per input
    files: str = ""
    document: Document = field(default_factory=Document)

    @property
    def tokens(self) -> int:
        return sum(counts.tokens for counts in self.counts) + self.document.tokens

    @property
    def documents(self) -> int:
        """That are kept."""
        return sum(counts.documents for counts in self.counts)

    def holds(self, sources: Sources) -> bool:
        """Whether the files read up to here are still the same."""
        read = self.position.files_read
        return read <= len(sources.files) and sources.identity_digests[read] == self.files


@dataclass
class Journal:
    """`mark` is the last place, `file_mark` the last that lies between two files.

    A run that stopped at a bad line resumes from `file_mark` when the file, mended meanwhile, is no longer the same.
    """

    settings: dict[str, Any]
    mark: Mark
    file_mark: Mark
    instances: int | None = None  # known once everything is tokenised
    shards: dict[str, str] = field(default_factory=dict)  # finished ones: name and checksum
    packed: dict[str, int] = field(default_factory=dict)  # what packing has counted, once it is done
    looked_at: str = ""  # the identity of the files that were looked at and found good
    bad: list[BadFile] = field(default_factory=list)  # files that are left out

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lost with it."""
        return self.instances is None and not self.mark.tokens

    def write(self, folder: Path) -> None:
        content = asdict(self)
        write_json(folder / FILE, content | {"crc": _sum(content)})


def read(folder: Path) -> Journal | None:
    """The journal in `folder`, None where there is none. Raises `UserError` when it is damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        stored = parse_json(path.read_bytes())
        if stored.pop("crc") != _sum(stored):
            raise ValueError("its sum is wrong")
        for name in ("mark", "file_mark"):
            mark = stored[name]
            counts = [Counts(**count) for count in mark["counts"]]
            document = Document(**mark.get("document", {}))
            stored[name] = Mark(Position(*mark["position"]), counts, mark["files"], document)
        stored["bad"] = [BadFile(**bad) for bad in stored.get("bad", ())]
        return Journal(**stored)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}). Delete {folder} and run again.") from error


def _sum(content: dict[str, Any]) -> int:
    """Of what a journal says: whoever goes on from it believes all of that."""
    return zlib.crc32(json.dumps(content).encode())


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two sets of settings, in words; empty when nothing does."""
    before = {**EARLIER, **before}
    return ", ".join(
        "other input files" if name == "inputs" else f"{name} {before.get(name)} there and {now[name]} here"
        for name in now
        if before.get(name) != now[name]
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `folder` (made when absent) for this process alone. Raises `UserError` when another one holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run that held the lock may have finished, and taken the lock file away, since it was opened here.
            if not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                raise BlockingIOError(errno.EWOULDBLOCK, "finished meanwhile")
        except BlockingIOError as error:
            raise UserError(f"another run is at work in {folder}. Wait for it, or choose another `output`.") from error
        yield
