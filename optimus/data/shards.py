"""Reads a folder of prepared data: `index.json`, `tokenizer.json`, `sums.npy` and the shards.

A shard is a `.npy` file with an array [instances, context] of token ids; with `masked` in the index, the ids may have
flags.
"""

import glob
import threading
import zlib
from bisect import bisect_right
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optimus.data import tokenizer as tokenizers
from optimus.data.chat import ChatTemplate
from optimus.data.contamination import WORDS
from optimus.data.remote import RemoteFolder, is_remote
from optimus.data.selection import Selection
from optimus.data.token_formats import WRITTEN
from optimus.disk import check_mapped, parse_json, plain_name, user_path
from optimus.errors import UserError, naming_read_errors

INDEX = "index.json"
SUMS = "sums.npy"  # CRC-32 of the bytes of each instance, an array [instances]
NOT_PREDICTED = 1 << 31  # a bit of a stored token that the model does not predict
INSIDE = 1 << 30  # a bit of a stored end-of-text token that does not end its document
BEGINS = 1 << 29  # a bit of a document's first token after a token other than end-of-text; only in rows of a dataset
ENDLESS = 1 << 62  # `Rows.instances` of a stream, whose length is unknown
CACHE = "~/.cache/optimus/data"  # default folder for copies of files at URLs
FORMAT = "optimus-tokens"
TOKEN_FILES = "optimus-token-files"  # the format of an index of token files of another trainer
VERSION = 1
# Values of the settings that an index from an earlier version lacks.
EARLIER = {
    "parse_special": True,
    "pack": "concatenate",
    "encoding": "utf-8",
    "plugins": {},
    "to": "optimus",
    "exclude": None,
    "exclude_words": WORDS,
    **asdict(Selection()),
}


class Rows(Protocol):
    """Rows of token ids that a run trains on."""

    folder: Path  # names the rows in messages
    index: dict[str, Any]
    instances: int
    context: int  # tokens of a row
    vocab_size: int
    eos_id: int
    parse_special: bool
    padded: bool  # True if end-of-text tokens without flags may pad rows
    masked: bool  # True if tokens may have the flags above

    @property
    def tokenizer_path(self) -> Path:
        """The path of the tokenizer's file."""

    def stored_rows(self, start: int, stop: int) -> NDArray[np.unsignedinteger[Any]]:
        """Returns rows `start` to `stop - 1` as an array [stop - start, context] of token ids with their flags."""

    def check_model(self, context: int, vocab_size: int) -> None:
        """Raises `UserError` unless a model of `vocab_size` tokens can train on sequences of `context` tokens."""

    def verify(self) -> None:
        """Raises `UserError` for rows that differ from their checksums."""


def parts_of(index: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries of the shards, or of the blocks of token files."""
    return list(index["blocks" if index["format"] == TOKEN_FILES else "shards"])


def token_files_name(folder: str | Path, index: dict[str, Any]) -> str:
    """Returns the name of the token files that `prepare` with `to` wrote into the folder, such as
    megatron:FOLDER/text_document."""
    name = WRITTEN[index["to"]]
    return f"{index['to']}:{glob.escape(str(folder)) if glob.has_magic(name) else folder}/{name}"


def read_index(folder: Path, *, token_files: bool = False) -> dict[str, Any]:
    """Reads the content of `index.json`. Raises `UserError` if the file is absent, damaged, or of another format or
    version; also for the index of token files, unless `token_files`."""
    path = folder / INDEX
    if not path.is_file():
        raise UserError(
            f"{folder} is not a folder of prepared data: it has no {INDEX}. Make one with `optimus prepare`."
        )
    try:
        with naming_read_errors(path):
            index = parse_json(path.read_bytes())
        form, version = index["format"], index["version"]
        if form == TOKEN_FILES:
            _check_token_files(path, index, token_files)
        elif form != FORMAT:
            raise ValueError(f"its format is {form!r}, not {FORMAT!r}")
        elif version == VERSION:
            _check_index(index)
    except (ValueError, KeyError, TypeError) as error:
        what = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path} is damaged ({what}). Prepare the data again.") from error
    if version != VERSION:
        raise UserError(f"{path} has version {version}; this Optimus reads version {VERSION}. Prepare the data again.")
    return dict(index)


def _check_token_files(path: Path, index: dict[str, Any], wanted: bool) -> None:
    """Raises `UserError` unless token files are `wanted`, and `KeyError`, `TypeError` or `ValueError` for a missing or
    wrong entry."""
    name = token_files_name(path.parent, index)
    if not wanted:
        raise UserError(
            f"{path.parent} has token files of another trainer ({index['to']}), not shards: name them as {name}, with "
            f"data.tokenizer {path.parent}"
        )
    for block in index["blocks"]:
        plain_name(block["file"])
    dict(index["settings"])


def _check_index(index: dict[str, Any]) -> None:
    """Raises `KeyError`, `TypeError` or `ValueError` for a missing or wrong entry."""
    if index["dtype"] not in ("<u2", "<u4"):
        raise ValueError(f"unknown dtype {index['dtype']!r}")
    if index.get("sums", SUMS) != SUMS:
        raise ValueError(f"its checksums are in {index['sums']!r}, not in {SUMS!r}")
    for shard in index["shards"]:
        plain_name(shard["file"])
        str(shard["sha256"])
    counts = [index["context"], index["instances"], *(shard["instances"] for shard in index["shards"])]
    if not all(type(count) is int and count > 0 for count in counts):
        raise ValueError("context and instances must be positive")
    vocab, eos = index["tokenizer"]["vocab_size"], index["tokenizer"]["eos_id"]
    if not (type(vocab) is type(eos) is int and 0 <= eos < vocab <= 1 << 31):
        raise ValueError("vocab_size and eos_id must be integers, and eos_id less than vocab_size")
    str(index["tokenizer"]["sha256"])
    totals = [index["tokens"], index["dropped_tokens"], index.get("padding_tokens", 0)]
    if not all(type(total) is int and total >= 0 for total in totals):
        raise ValueError("numbers of tokens must be integers of at least 0")
    if "chat" in index:
        ChatTemplate.read(index["chat"])
    settings = {**EARLIER, **index.get("settings", {})}
    if not (type(settings["parse_special"]) is type(index.get("masked", False)) is bool):
        raise ValueError("masked and parse_special must be true or false")
    if sum(shard["instances"] for shard in index["shards"]) != index["instances"]:
        raise ValueError("the instances of the shards do not add up")


class Shards:
    """An opened folder of prepared data. Threads may share one object.

    Opening checks the index and the tokenizer, and reading checks the checksums. The constructor and the reads raise
    `UserError` for damaged data.

    For a folder at a URL, the constructor and the reads copy files into `cache`. With `read_ahead`, a read also copies
    the shard after its own.
    """

    def __init__(self, folder: str | Path, cache: str | Path = CACHE, *, read_ahead: bool = True) -> None:
        self._read_ahead = read_ahead
        self._remote = RemoteFolder(str(folder), cache, INDEX) if is_remote(folder) else None
        self.folder = user_path(folder) if self._remote is None else self._remote.local
        self.index = read_index(self.folder)
        self.instances: int = self.index["instances"]
        self.context: int = self.index["context"]
        self.vocab_size: int = self.index["tokenizer"]["vocab_size"]
        self.eos_id: int = self.index["tokenizer"]["eos_id"]
        self.parse_special: bool = {**EARLIER, **self.index.get("settings", {})}["parse_special"]
        self.padded: bool = {**EARLIER, **self.index.get("settings", {})}["pack"] == "best-fit"
        self.masked: bool = self.index.get("masked", False)
        self._lock = threading.Lock()
        self._check_tokenizer()
        entries = self.index["shards"]
        self._starts = [0, *accumulate(entry["instances"] for entry in entries)]
        self._fetcher = None if self._remote is None else ThreadPoolExecutor(1, "shard-fetcher")
        self._fetched: dict[int, Future[NDArray[np.unsignedinteger[Any]]]] = {}
        self._arrays = {} if self._fetcher is not None else {i: self._open(i) for i in range(len(entries))}
        self._sums = self._load(SUMS, (self.instances,), "<u4") if "sums" in self.index else None
        self._verified: set[int] = set()

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / tokenizers.FILE

    @property
    def stream_tokens(self) -> int:
        """Number of tokens of all documents with their end-of-text tokens, without padding."""
        index = self.index
        return int(index["tokens"] + index["dropped_tokens"] - index.get("padding_tokens", 0))

    def row(self, i: int) -> NDArray[np.unsignedinteger[Any]]:
        """Returns instance i: `context` token ids."""
        return self.rows(i, i + 1)[0]

    def rows(self, start: int, stop: int) -> NDArray[np.unsignedinteger[Any]]:
        """Returns instances `start` to `stop - 1` as an array [stop - start, context]."""
        stored = self.stored_rows(start, stop)
        return np.bitwise_and(stored, INSIDE - 1, dtype=stored.dtype) if self.masked else stored

    def stored_rows(self, start: int, stop: int) -> NDArray[np.unsignedinteger[Any]]:
        """Reads instances like `rows`, with the flags `NOT_PREDICTED` and `INSIDE`."""
        if not 0 <= start < stop <= self.instances:
            raise IndexError(f"rows {start} to {stop} of {self.instances}")
        parts = []
        while start < stop:
            shard = bisect_right(self._starts, start) - 1
            first = self._starts[shard]
            end = min(stop, self._starts[shard + 1])
            part = self._array(shard)[start - first : end - first]
            self._check(shard, part, start)
            parts.append(part)
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def locate(self, row: int) -> tuple[Path, int]:
        """Returns (file, offset of the first byte) of instance `row`."""
        shard = bisect_right(self._starts, row) - 1
        array = self._array(shard)
        first = getattr(array, "offset", 0)  # `np.load` maps the file behind the header
        return self.folder / self.index["shards"][shard]["file"], first + (row - self._starts[shard]) * array.strides[0]

    def check_model(self, context: int, vocab_size: int) -> None:
        """Raises `UserError` unless `context` divides the length of a row and `vocab_size` is at least the
        tokenizer's."""
        if self.context % context:
            raise UserError(
                f"{self.folder} was prepared with context {self.context}, but the run needs {context}. "
                f"Set train.sequence_length to {self.context} or a divisor, or prepare the data with `context={context}`."
            )
        if self.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer of {self.folder} has {self.vocab_size} tokens, but the model's vocabulary only "
                f"{vocab_size}. Enlarge the model's vocabulary, or prepare the data with a smaller tokenizer."
            )

    def verify(self) -> None:
        """Reads every shard. Raises `UserError` at the first shard that differs from its checksum."""
        for shard in range(len(self.index["shards"])):
            array = self._array(shard)
            self._verify(shard)
            self._check(shard, array, self._starts[shard])

    def _check(self, shard: int, rows: NDArray[np.unsignedinteger[Any]], start: int) -> None:
        """Raises `UserError` if `rows`, which begin at instance `start`, differ from their checksums or contain a
        token outside the vocabulary. Without checksums of instances, verifies the whole shard once."""
        if self._sums is None:
            with self._lock:
                if shard not in self._verified:
                    self._verify(shard)
                    self._verified.add(shard)
        path = self.folder / self.index["shards"][shard]["file"]
        check_mapped(path, _mapped_bytes(self._array(shard)))
        if self._sums is not None:
            check_mapped(self.folder / SUMS, _mapped_bytes(self._sums))
        sums = [] if self._sums is None else self._sums[start : start + len(rows)].tolist()
        for number, (row, expected) in enumerate(zip(rows, sums), start):
            if zlib.crc32(row) != expected:
                raise _damaged(path, f"is corrupted: its checksum differs from {SUMS} at instance {number}")
        if (largest := int((rows & (INSIDE - 1) if self.masked else rows).max())) >= self.vocab_size:
            raise _damaged(path, f"contains the token {largest}, but the vocabulary has {self.vocab_size} tokens")

    def _verify(self, shard: int) -> None:
        entry = self.index["shards"][shard]
        path = self.folder / entry["file"]
        with naming_read_errors(path):
            found = tokenizers.file_sha256(path)
        if found != entry["sha256"]:
            if self._remote is not None:
                self._remote.forget(entry["file"])
                self._fetched.pop(shard, None)  # the next read fetches the shard again
                raise UserError(f"{self._remote.url}/{entry['file']} is corrupted: its checksum differs from {INDEX}")
            raise _damaged(path, f"is corrupted: its checksum differs from {INDEX}")

    def _check_tokenizer(self) -> None:
        path = self._path(tokenizers.FILE)
        if not path.is_file():
            raise UserError(f"{path} is missing. Restore the tokenizer that the data was prepared with.")
        with naming_read_errors(path):
            found = tokenizers.file_sha256(path)
        if found != self.index["tokenizer"]["sha256"]:
            raise UserError(
                f"tokenizer changed since prepare: {path} is not the tokenizer that made these tokens. "
                "Restore it, or prepare the data again."
            )

    def _array(self, shard: int) -> NDArray[np.unsignedinteger[Any]]:
        """Returns a shard. For a remote folder, fetches the shard, and with `read_ahead` starts to fetch the next."""
        if self._fetcher is None:
            return self._arrays[shard]
        with self._lock:
            following = (shard + 1) % len(self.index["shards"])
            for each in (shard, following) if self._read_ahead else (shard,):
                if each not in self._fetched or _failed(self._fetched[each]):
                    self._fetched[each] = self._fetcher.submit(self._open, each)
            fetched = self._fetched[shard]
        return fetched.result()

    def _open(self, shard: int) -> NDArray[np.unsignedinteger[Any]]:
        entry = self.index["shards"][shard]
        fetched = self._remote is not None and not (self.folder / entry["file"]).exists()
        array = self._load(entry["file"], (entry["instances"], self.context), self.index["dtype"])
        if fetched:
            self._verify(shard)
        return array

    def _path(self, name: str) -> Path:
        """Returns the local path of a file of the folder, and fetches a remote file first."""
        return self.folder / name if self._remote is None else self._remote.fetch(name)

    def _load(self, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[np.unsignedinteger[Any]]:
        path = self._path(name)
        if not path.is_file():
            raise _damaged(path, f"is missing, though {INDEX} lists it")
        try:
            array = np.load(path, mmap_mode="r")
            if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
                raise ValueError("not a C-contiguous array")
        except Exception as error:  # NumPy parses the header as Python: errors of any type are possible
            raise _damaged(path, f"is truncated or damaged ({error})") from error
        if array.shape != shape or array.dtype != np.dtype(dtype):
            wanted = f"{INDEX} says {np.dtype(dtype)} of shape {shape}"
            raise _damaged(path, f"contains {array.dtype} of shape {array.shape}, but {wanted}")
        return array


def _mapped_bytes(array: NDArray[Any]) -> int:
    """Returns the end of an array in its file: `np.load` maps the file behind the header."""
    return int(getattr(array, "offset", 0)) + array.nbytes


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} {what}. Restore it or prepare the data again.")


def _failed(fetched: Future[Any]) -> bool:
    return fetched.done() and fetched.exception() is not None
