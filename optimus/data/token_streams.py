"""Reads streams of tokens from files in the formats of Megatron-LM, OLMo-core and MosaicML Streaming.

Legend: B number of documents + 1, Q sequences, S samples of a shard.
"""

import gzip
import hashlib
import io
import os
import shutil
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from optimus.data.files import ZstdStream
from optimus.data.remote import RemoteFolder, is_remote, put
from optimus.data.token_formats import TokenFormatRow
from optimus.disk import check_mapped, parse_json, plain_path, user_path
from optimus.errors import UserError, naming_read_errors

Tokens = NDArray[np.integer[Any]]

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# Types of tokens in Megatron-LM's index, by code.
MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NPY = b"\x93NUMPY"
_COLUMNS = ("tokens", "input_ids")  # names of the column with tokens, as in LLM Foundry
# Types of values in the encoding "ndarray" of MDS, by code.
_MDS_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
_NAMED_TYPES = {np.dtype(kind).name: kind for kind in _MDS_TYPES.values()}
_OPEN_SHARDS = 16  # maximum number of MDS shards whose sample positions are cached


class TokenFile(Protocol):
    """The tokens of one file."""

    path: Path
    tokens: int

    def read(self, start: int, stop: int) -> Tokens:
        """Returns tokens `start` to `stop - 1` of the file [stop - start]."""

    def byte(self, token: int) -> int:
        """Returns the offset of a token in the file."""


class TokenStream:
    """The tokens of all parts, in order. Unless `indexed`, an end-of-text token ends a document."""

    indexed = False  # True if an index knows where documents begin
    documents: int | None = None  # the number of documents; None if no index has it

    def __init__(self, parts: Sequence[TokenFile]) -> None:
        self.parts = [part for part in parts if part.tokens]
        self.starts = [0, *accumulate(part.tokens for part in self.parts)]  # the first token of each part, and the end

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.starts[-1]

    @property
    def files(self) -> list[Path]:
        """The files on which the tokens and their documents depend."""
        return [part.path for part in self.parts]

    def read(self, start: int, stop: int) -> Tokens:
        """Returns tokens `start` to `stop - 1` [stop - start]."""
        found = []
        while start < stop:
            number = bisect_right(self.starts, start) - 1
            first, end = self.starts[number], min(stop, self.starts[number + 1])
            found.append(self.parts[number].read(start - first, end - first))
            start = end
        return found[0] if len(found) == 1 else np.concatenate(found)

    def locate(self, token: int) -> tuple[Path, int]:
        """Returns (file, offset of the first byte) of a token."""
        number = bisect_right(self.starts, token) - 1
        part = self.parts[number]
        return part.path, part.byte(token - self.starts[number])

    def where(self, token: int) -> str:
        """Returns the file and the byte of a token, for messages."""
        path, byte = self.locate(token)
        return f"{path}, byte {byte:,}"

    def begins(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the positions, from `start` to `stop - 1`, at which documents begin; only for an `indexed` stream."""
        raise NotImplementedError


class _Flat:
    """A file of tokens without anything between them, from byte `first` on."""

    def __init__(self, path: Path, dtype: str, first: int = 0) -> None:
        self.path, self._first = path, first
        with naming_read_errors(path):
            size = path.stat().st_size - first
            item = np.dtype(dtype).itemsize
            if size % item:
                raise UserError(
                    f"{path} has {size:,} bytes of tokens, which is not a multiple of {item}: it is truncated, or its "
                    "tokens have another type"
                )
            self.tokens = size // item
            self._array: Tokens = (
                np.memmap(path, dtype, "r", first, (self.tokens,)) if self.tokens else np.empty(0, dtype)
            )

    def read(self, start: int, stop: int) -> Tokens:
        check_mapped(self.path, self.byte(self.tokens))
        return self._array[start:stop]

    def byte(self, token: int) -> int:
        return self._first + token * self._array.itemsize


class _Megatron(TokenStream):
    """The tokens of PREFIX.bin, and the documents of PREFIX.idx."""

    indexed = True

    def __init__(self, prefix: Path) -> None:
        self._index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (self._index, data):
            if not path.is_file():
                raise UserError(
                    f"{path} does not exist: give the common path of a .bin and an .idx file, without suffix"
                )
        with naming_read_errors(self._index), self._index.open("rb") as file:
            head = file.read(34)
        if len(head) < 34 or head[:9] != MEGATRON_MAGIC or head[17] not in MEGATRON_TYPES:
            raise UserError(f"{self._index} is not an index of Megatron-LM (MMIDIDX, with integers): write it again")
        version, sequences, borders = (int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26))
        self._index_size = size = self._index.stat().st_size
        if version != 1 or size < 34 + 12 * sequences + 8 * borders:
            raise UserError(
                f"{self._index} has version {version} and {size:,} bytes, but version 1 with {sequences:,} sequences and "
                f"{borders - 1:,} documents has {34 + 12 * sequences + 8 * borders:,}: it is truncated or damaged"
            )
        flat = _Flat(data, MEGATRON_TYPES[head[17]])
        super().__init__([flat])
        self._item = np.dtype(MEGATRON_TYPES[head[17]]).itemsize
        if not sequences or borders < 2:
            raise UserError(f"{self._index} has no documents")
        # NumPy copies unaligned arrays as a whole for many operations: only index, slice and bisect these.
        self._sizes_Q = _table(self._index, "<i4", 34, sequences)
        self._bytes_Q = _table(self._index, "<i8", 34 + 4 * sequences, sequences)
        self._borders_B = _table(self._index, "<i8", 34 + 12 * sequences, borders)
        self.documents = borders - 1
        if (self._bytes_Q[0], self._borders_B[0], self._borders_B[-1]) != (0, 0, sequences):
            raise UserError(f"{self._index}: the documents do not cover all sequences: write the index again")
        end = int(self._bytes_Q[-1]) + int(self._sizes_Q[-1]) * self._item
        if end != flat.tokens * self._item:
            raise UserError(
                f"{data} has {flat.tokens * self._item:,} bytes, but {self._index.name} describes {end:,}: one of the two "
                "files is truncated, or they do not belong together"
            )

    @property
    def files(self) -> list[Path]:
        return [self._index, *super().files]

    def begins(self, start: int, stop: int) -> NDArray[np.int64]:
        check_mapped(self._index, self._index_size)
        first, last = (bisect_left(self._bytes_Q, token * self._item) for token in (start, stop))
        self._check(max(0, first - 1), min(last + 1, len(self._bytes_Q)))
        low, high = (bisect_left(self._borders_B, sequence) for sequence in (first, last))
        near_B, before = self._borders_B[max(0, low - 2) : high + 2], min(low, 2)
        if (wrong := np.flatnonzero(np.diff(near_B, prepend=0, append=len(self._bytes_Q)) < 0)).size:
            raise UserError(
                f"{self._index}: document {low - before + int(wrong[0]):,} does not begin after the document before it: "
                "write the index again"
            )
        return np.asarray(self._bytes_Q[near_B[before : before + high - low]] // self._item, np.int64)

    def _check(self, first: int, last: int) -> None:
        """Raises `UserError` unless the sequences from `first` to `last - 1` follow one another in the file."""
        bytes_Q = self._bytes_Q[first:last]
        sizes_Q = self._sizes_Q[first:last].astype(np.int64)
        if (gaps := np.flatnonzero((np.diff(bytes_Q) != sizes_Q[:-1] * self._item) | (sizes_Q[:-1] < 0))).size:
            number = first + int(gaps[0])
            raise UserError(
                f"{self._index}: sequence {number + 1:,} does not begin where sequence {number:,} ends: write the "
                "index again"
            )


def _table(path: Path, dtype: str, first: int, count: int) -> NDArray[np.integer[Any]]:
    """Maps `count` integers from byte `first` of a file on."""
    return np.asarray(np.memmap(path, dtype, "r", first, (count,)))


def _open_megatron(path: str, vocab_size: int, cache: str | Path) -> TokenStream:
    """Opens PREFIX.bin of Megatron-LM, and PREFIX.idx, which says where documents begin."""
    return _Megatron(user_path(path))


def _open_npy(path: str, vocab_size: int, cache: str | Path) -> TokenStream:
    """Opens the token files of OLMo-core that a glob names, in the order of their names.

    A file has tokens alone, in the smallest unsigned type that `vocab_size` needs, or is a NumPy array of integers.
    """
    text = str(user_path(path))
    named = [text] if os.path.isfile(text) else glob(text, recursive=True)  # a file's name may contain brackets
    paths = sorted(Path(each) for each in named if os.path.isfile(each))
    if not paths:
        literal = " (write [[] for a bracket in a glob)" if "[" in path else ""
        raise UserError(f"npy:{path} names no file: give a file, or a glob such as npy:tokens/*.npy{literal}")
    return TokenStream([_npy_file(each, vocab_size) for each in paths])


def flat_type(vocab_size: int) -> str:
    """Returns the type of tokens in files of OLMo-core: the smallest unsigned integers that the vocabulary needs."""
    return np.dtype(np.min_scalar_type(vocab_size - 1)).newbyteorder("<").str


def _npy_file(path: Path, vocab_size: int) -> _Flat:
    with naming_read_errors(path), path.open("rb") as file:
        if file.read(len(_NPY)) != _NPY:
            return _Flat(path, flat_type(vocab_size))
        try:
            file.seek(0)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except Exception as error:  # NumPy parses the header as a Python literal, which can raise any error
            raise UserError(f"{path} is a damaged NumPy array ({error}): write it again") from error
        if len(shape) != 1 or dtype.kind not in "iu":
            raise UserError(f"{path} has {dtype} of shape {shape}: give one-dimensional integers")
        found = _Flat(path, dtype.str, file.tell())
    if found.tokens != shape[0]:
        raise UserError(f"{path} has {found.tokens:,} tokens, but its header describes {shape[0]:,}: write it again")
    return found


class _Located(NamedTuple):
    """The positions of the tokens in an MDS shard."""

    data: NDArray[np.uint8]  # the bytes of the file
    byte_S: NDArray[np.int64]  # the offset of each sample's first token
    type_S: NDArray[np.uint8] | None  # the code of the type of each sample's tokens; None if the shard has one type
    end_S: NDArray[np.int64]  # the number of tokens of the shard up to the end of each sample


class _MdsShard:
    """A shard of MosaicML Streaming: a table of samples, one of whose columns has tokens."""

    def __init__(self, path: Path, entry: dict[str, Any], locate: Callable[["_MdsShard"], _Located]) -> None:
        self.path, self._locate = path, locate
        self.samples, (names, self.encodings, self.sizes) = entry["samples"], _columns(entry)
        column = next((names.index(name) for name in _COLUMNS if name in names), None)
        if column is None:
            raise UserError(f"{path} has the columns {', '.join(names)}: one of them must be {' or '.join(_COLUMNS)}")
        self.column: int = column
        self.dtype, self.has_shape = _encoding(path, self.encodings[column])
        found = locate(self)
        self.tokens = int(found.end_S[-1]) if self.samples else 0

    def read(self, start: int, stop: int) -> Tokens:
        found, parts = self._locate(self), []
        check_mapped(self.path, len(found.data))
        while start < stop:
            sample = int(np.searchsorted(found.end_S, start, "right"))
            first, end = (int(found.end_S[sample - 1]) if sample else 0), min(stop, int(found.end_S[sample]))
            dtype = self._type(found, sample)
            at = int(found.byte_S[sample]) + (start - first) * dtype.itemsize
            parts.append(found.data[at : at + (end - start) * dtype.itemsize].view(dtype))
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def byte(self, token: int) -> int:
        found = self._locate(self)
        sample = int(np.searchsorted(found.end_S, token, "right"))
        before = int(found.end_S[sample - 1]) if sample else 0
        return int(found.byte_S[sample]) + (token - before) * self._type(found, sample).itemsize

    def _type(self, found: _Located, sample: int) -> np.dtype[Any]:
        return np.dtype(self.dtype if found.type_S is None else _MDS_TYPES[int(found.type_S[sample])])


def _columns(entry: dict[str, Any]) -> tuple[list[str], list[str], list[int | None]]:
    """Returns the names, the encodings and the sizes of a shard's columns. Raises `ValueError` for wrong values."""
    names, encodings, sizes = (entry[f"column_{each}"] for each in ("names", "encodings", "sizes"))
    if not all(isinstance(each, str) and each.isprintable() for each in [*names, *encodings]):
        raise ValueError("the names and encodings of columns must be texts of one line")
    if not all(type(each) is int and 0 <= each < 1 << 32 for each in [entry["samples"], *sizes] if each is not None):
        raise ValueError("samples and the sizes of columns must be integers from 0 to 2^32 - 1")
    if entry["samples"] is None or not len(names) == len(encodings) == len(sizes):
        raise ValueError("samples, names, encodings and sizes must be given for all columns")
    return list(names), list(encodings), list(sizes)


def _encoding(path: Path, encoding: str) -> tuple[str | None, bool]:
    """Returns (type of the tokens, or None if each sample stores a type; True if each sample stores a shape)."""
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind == "bytes":
        return "<i8", False  # as older versions of LLM Foundry write
    if kind != "ndarray" or (dtype and dtype not in _NAMED_TYPES):
        raise UserError(f"{path}: its tokens are encoded as {encoding}: give bytes, or an ndarray of integers")
    return (_NAMED_TYPES[dtype] if dtype else None), not shape


@lru_cache(maxsize=_OPEN_SHARDS)
def _located(shard: _MdsShard) -> _Located:
    """Locates the samples of a shard. The file begins with the number of samples and their S + 1 offsets."""
    with naming_read_errors(shard.path):
        data = np.memmap(shard.path, np.uint8, "r") if shard.path.stat().st_size else np.empty(0, np.uint8)
    heads = data[: 4 + 4 * (shard.samples + 1)]
    if len(heads) < 4 + 4 * (shard.samples + 1):
        raise UserError(f"{shard.path} has {len(data):,} bytes, too few for {shard.samples:,} samples: get it again")
    counted, *_ = heads[:4].view("<u4").tolist()
    if counted != shard.samples:
        raise UserError(f"{shard.path} has {counted:,} samples, but index.json says {shard.samples:,}: get it again")
    edge_S = heads[4:].view("<u4").astype(np.int64)
    if np.any(np.diff(edge_S) < 0) or edge_S[-1] > len(data):
        raise UserError(
            f"{shard.path} has {len(data):,} bytes, but its samples end at {int(edge_S[-1]):,}: get it again"
        )

    def within(at_S: NDArray[np.int64], stop_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `at_S`. Raises `UserError` for a byte after `stop_S`."""
        if np.any(at_S > stop_S):
            raise UserError(f"{shard.path}: the sizes of its samples do not fit its columns: get it again")
        return at_S

    own = [number for number, size in enumerate(shard.sizes) if size is None]  # columns with sizes by sample
    at_S = within(edge_S[:-1] + 4 * len(own), edge_S[1:])
    for number, size in enumerate(shard.sizes[: shard.column]):
        at_S = at_S + (_integers(data, edge_S[:-1] + 4 * own.index(number)) if size is None else size)
    size = shard.sizes[shard.column]
    length_S = _integers(data, edge_S[:-1] + 4 * own.index(shard.column)) if size is None else np.int64(size)
    stop_S = within(at_S + length_S, edge_S[1:])
    type_S = None
    if shard.dtype is None:
        type_S = data[within(at_S + 1, stop_S) - 1]
        at_S = at_S + 1
        if unknown := {*type_S.tolist()} - {*_MDS_TYPES}:
            raise UserError(f"{shard.path}: tokens of a sample have the type {min(unknown)}, which is no integer")
    if shard.has_shape:
        head_S = data[within(at_S + 1, stop_S) - 1]
        if np.any(head_S >> 2 != 1):
            raise UserError(f"{shard.path}: a sample has tokens of {int(head_S.max() >> 2)} dimensions: give one")
        at_S = at_S + 1 + (1 << (head_S & 3).astype(np.int64))
    item = {code: np.dtype(kind).itemsize for code, kind in _MDS_TYPES.items()}
    items_S = (
        np.int64(np.dtype(shard.dtype).itemsize) if type_S is None else np.array([item[t] for t in type_S.tolist()])
    )
    count_S, rest_S = np.divmod(stop_S - within(at_S, stop_S), items_S)
    within(rest_S, np.zeros_like(rest_S))
    return _Located(data, at_S, type_S, np.cumsum(count_S))


def _integers(data: NDArray[np.uint8], at_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """Reads a 32-bit integer at each offset [S]."""
    return np.ascontiguousarray(data[at_S[:, None] + np.arange(4)]).view("<u4")[:, 0].astype(np.int64)


def _open_mds(path: str, vocab_size: int, cache: str | Path) -> TokenStream:
    """Opens a folder of MosaicML Streaming, or its URL. Decompressed shards, and shards of a URL, are copied to `cache`."""
    remote = RemoteFolder(path, cache, "index.json") if is_remote(path) else None
    folder = user_path(path) if remote is None else remote.local
    file = folder / "index.json"
    try:
        with naming_read_errors(file):
            index = parse_json(file.read_bytes())
        shards = [
            _MdsShard(_raw(folder, remote, each, Path(cache)), each, _located)
            for each in index["shards"]
            if _is_mds(each, file)
        ]
    except (ValueError, KeyError, TypeError) as error:
        what = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{file} is no index of MosaicML Streaming ({what}): write the data again") from error
    return TokenStream(shards)


def _is_mds(entry: dict[str, Any], file: Path) -> bool:
    if entry["format"] != "mds":
        raise UserError(f"{file}: a shard has the format {entry['format']!r}, without token ids: give shards in mds")
    return True


def _raw(folder: Path, remote: RemoteFolder | None, entry: dict[str, Any], cache: Path) -> Path:
    """Returns the path of a shard's file, after downloading or decompressing it into `cache` if necessary."""
    name = plain_path(entry["raw_data"]["basename"])  # in merged data with its folder
    if (folder / name).is_file():
        return folder / name
    if entry["zip_data"] is None:
        return folder / name if remote is None else remote.fetch(name)
    packed = plain_path(entry["zip_data"]["basename"])
    source = folder / packed if remote is None else remote.fetch(packed)
    with naming_read_errors(source):
        stamp = source.stat()
    key = hashlib.sha256(repr((str(source.resolve()), stamp.st_size, stamp.st_mtime_ns)).encode()).hexdigest()[:16]
    return put(user_path(cache) / f"mds-{key}" / name, lambda path: _decompress(source, path))


def _decompress(source: Path, target: Path) -> None:
    kind = source.suffix.removeprefix(".")
    if kind not in ("gz", "zstd"):
        raise UserError(f"{source} is compressed as {kind}: decompress the shards, or write them with zstd, gz or none")
    try:
        with source.open("rb") as packed, target.open("wb") as file:
            stream = gzip.GzipFile(fileobj=packed) if kind == "gz" else io.BufferedReader(ZstdStream(packed))
            shutil.copyfileobj(stream, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{source}: damaged or truncated compressed file ({error}). Get it again.") from error


MEGATRON = TokenFormatRow("megatron", _open_megatron)
NPY = TokenFormatRow("npy", _open_npy)
MDS = TokenFormatRow("mds", _open_mds)
