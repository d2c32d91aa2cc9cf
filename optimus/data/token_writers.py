"""Writes the documents of token streams, in their order, as token files of Megatron-LM and of OLMo-core.

A file consists of tables of integers. Several processes write its blocks, each at its place in the file: a block depends
only on the streams, so that the bytes are the same for any number of processes. Blocks begin at multiples of the largest
page, because machines that write the same page of a file on NFS may overwrite each other's bytes.
"""

import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from optimus.data.gather import DIGEST, Stream, StreamReader
from optimus.data.token_formats import WRITTEN
from optimus.data.token_streams import MEGATRON_MAGIC, MEGATRON_TYPES, flat_type
from optimus.data.units import read_array
from optimus.disk import replace_text
from optimus.errors import UserError

BLOCK = 512 << 20  # bytes of a block, a multiple of the pages of all processors
_AT_ONCE = 1 << 20  # integers made at once
_LARGEST_UINT16 = 65500  # vocabulary from which Megatron-LM writes 32 bits
_LONGEST = (1 << 31) - 1  # tokens of a sequence in an index of Megatron-LM


class FileBlock(NamedTuple):
    """The bytes `start` to `stop - 1` of a file."""

    file: str
    start: int
    stop: int

    def digest(self, folder: Path) -> Path:
        """Returns the file with the SHA-256 of the block, which is written last."""
        return folder / f"{self.file}-{self.start}{DIGEST}"


class TokenFilePlan(NamedTuple):
    """The files of a form that are to be written from `streams`.

    Each file in `ends` is an array with the ends of the documents of a stream, from its beginning. `borders` are the
    first tokens of the files, and the end of the last one.
    """

    form: "TokenFileForm"
    streams: Sequence[Stream]
    ends: Sequence[Path]
    borders: Sequence[int]
    stream_type: str  # of the tokens in the streams
    dtype: str  # of the tokens in the files

    def blocks(self) -> list[FileBlock]:
        """Returns the blocks of all files, in order."""
        return [
            FileBlock(name, start, min(start + BLOCK, size))
            for name, size in self.form.sizes(self).items()
            for start in range(0, size, BLOCK)
        ]

    @property
    def item(self) -> int:
        """Bytes of a token in the files."""
        return np.dtype(self.dtype).itemsize


class _IntegerTable(NamedTuple):
    """`length` integers of a file. `values` returns those from `first` to `last - 1`."""

    dtype: str
    length: int
    values: Callable[[int, int], NDArray[Any]]


class TokenFileForm(Protocol):
    """The files of another trainer: `token_type` is the type that its writer chooses for a vocabulary, `borders` are
    those of a `TokenFilePlan`, `sizes` are the files with their bytes, and `tables` the content of a file."""

    def token_type(self, vocab_size: int) -> str: ...

    def borders(self, streams: Sequence[Stream], ends: Sequence[Path], most: int) -> list[int]: ...

    def sizes(self, plan: TokenFilePlan) -> dict[str, int]: ...

    def tables(self, plan: TokenFilePlan, file: str, reader: StreamReader) -> list[_IntegerTable]: ...


class _Megatron:
    """Writes a file of tokens, and an index of the documents."""

    def token_type(self, vocab_size: int) -> str:
        return "<u2" if vocab_size < _LARGEST_UINT16 else "<i4"

    def borders(self, streams: Sequence[Stream], ends: Sequence[Path], most: int) -> list[int]:
        return [0, sum(stream.tokens for stream in streams)]

    def sizes(self, plan: TokenFilePlan) -> dict[str, int]:
        documents, name = sum(map(len, _arrays(plan.ends))), WRITTEN["megatron"]
        index = 34 + 12 * documents + 8 * (documents + 1)
        return {f"{name}.bin": plan.borders[-1] * plan.item, f"{name}.idx": index}

    def tables(self, plan: TokenFilePlan, file: str, reader: StreamReader) -> list[_IntegerTable]:
        return _megatron_index(plan) if file.endswith(".idx") else [_tokens(plan, 0, reader)]


class _Flat:
    """Writes files of tokens that end where documents end."""

    def token_type(self, vocab_size: int) -> str:
        return flat_type(vocab_size)

    def borders(self, streams: Sequence[Stream], ends: Sequence[Path], most: int) -> list[int]:
        return _document_borders(streams, ends, most)

    def sizes(self, plan: TokenFilePlan) -> dict[str, int]:
        digits = max(5, len(str(len(plan.borders) - 2)))  # the order of the names is that of the documents
        pairs = enumerate(pairwise(plan.borders))
        return {
            WRITTEN["npy"].replace("*", f"{number:0{digits}}"): (stop - start) * plan.item
            for number, (start, stop) in pairs
        }

    def tables(self, plan: TokenFilePlan, file: str, reader: StreamReader) -> list[_IntegerTable]:
        return [_tokens(plan, plan.borders[[*self.sizes(plan)].index(file)], reader)]


MEGATRON, FLAT = _Megatron(), _Flat()


def _tokens(plan: TokenFilePlan, first: int, reader: StreamReader) -> _IntegerTable:
    """Returns the tokens from number `first` of all streams to the end."""
    return _IntegerTable(
        plan.dtype,
        plan.borders[-1] - first,
        lambda start, stop: reader.values(first + start, first + stop, plan.stream_type),
    )


def _document_borders(streams: Sequence[Stream], ends: Sequence[Path], most: int) -> list[int]:
    """Returns the first token of each file, and the end of the last one.

    A file has as many documents as fit into `most` tokens, but at least one.
    """
    starts = [0, *accumulate(stream.tokens for stream in streams)]
    arrays = _arrays(ends)

    def number_of(token: int) -> int:
        return min(bisect_right(starts, token), len(streams)) - 1

    borders = [0]
    while borders[-1] < starts[-1]:
        limit = min(borders[-1] + most, starts[-1])
        number = number_of(limit)
        count = int(np.searchsorted(arrays[number], limit - starts[number], "right"))
        border = starts[number] + (int(arrays[number][count - 1]) if count else 0)
        if border <= borders[-1]:  # a document that is longer than a file
            number = number_of(borders[-1])
            after = int(np.searchsorted(arrays[number], borders[-1] - starts[number], "right"))
            border = starts[number] + int(arrays[number][after])
        borders.append(border)
    return borders


def _arrays(ends: Sequence[Path]) -> list[NDArray[np.int64]]:
    return [read_array(path, path) for path in ends]


def block_writer(folder: Path, plan: TokenFilePlan) -> Callable[[FileBlock], None]:
    """Returns a function that writes a block into its file in `folder`, and then its SHA-256 into `FileBlock.digest`.

    The function raises `UserError` for a document that the format cannot hold.
    """

    def write(block: FileBlock) -> None:
        digest = hashlib.sha256()
        with ExitStack() as stack:
            reader = stack.enter_context(StreamReader(plan.streams, np.dtype(plan.stream_type).itemsize))
            tables = plan.form.tables(plan, block.file, reader)
            # Others may write blocks of the same file, or this block.
            descriptor = os.open(folder / block.file, os.O_WRONLY | os.O_CREAT, 0o666)
            file = stack.enter_context(os.fdopen(descriptor, "wb"))
            file.seek(block.start)
            for data in _bytes(tables, block.start, block.stop):
                digest.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_text(block.digest(folder), digest.hexdigest())

    return write


def _megatron_index(plan: TokenFilePlan) -> list[_IntegerTable]:
    """Returns the tables of an .idx file: the head, and of each document its length, its first byte and its number."""
    arrays, item = _arrays(plan.ends), plan.item
    first_S = [0, *accumulate(map(len, arrays))]  # number of the first document of each stream
    before_S = [0, *accumulate(each.tokens for each in plan.streams)]
    documents = first_S[-1]

    def borders(first: int, last: int) -> NDArray[np.int64]:
        """Returns the positions in front of documents `first` to `last - 1`, and behind the last of them."""
        parts = [
            ends_N[max(0, first - 1 - start) : max(0, last - start)] + before
            for ends_N, start, before in zip(arrays, first_S, before_S)
        ]
        return np.concatenate([[0], *parts] if first == 0 else parts)

    def lengths(first: int, last: int) -> NDArray[np.int64]:
        length_N = np.diff(borders(first, last))
        if length_N.max() > _LONGEST:
            raise UserError(
                f"document {first + int(length_N.argmax()):,} has {length_N.max():,} tokens, but an index of Megatron-LM "
                f"holds lengths up to {_LONGEST:,}: leave it out with `max_tokens`"
            )
        return length_N

    code = {kind: code for code, kind in MEGATRON_TYPES.items()}[plan.dtype]
    head = np.frombuffer(MEGATRON_MAGIC + struct.pack("<QBQQ", 1, code, documents, documents + 1), "u1")
    return [
        _IntegerTable("u1", len(head), lambda first, last: head[first:last]),
        _IntegerTable("<i4", documents, lengths),
        _IntegerTable("<i8", documents, lambda first, last: borders(first, last)[:-1] * item),
        _IntegerTable("<i8", documents + 1, np.arange),
    ]


def _bytes(tables: Sequence[_IntegerTable], start: int, stop: int) -> Iterator[memoryview]:
    """Yields the bytes `start` to `stop - 1` of tables that follow one another."""
    position = 0
    for table in tables:
        item = np.dtype(table.dtype).itemsize
        begin, end = max(start, position) - position, min(stop, position + table.length * item) - position
        while begin < end:
            first = begin // item
            last = min(first + _AT_ONCE, -(-end // item))
            data = table.values(first, last).astype(table.dtype).data.cast("B")
            yield data[begin - first * item : end - first * item]
            begin = last * item
        position += table.length * item
