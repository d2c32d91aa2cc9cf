"""Writes shards: rows of the token streams in a shuffled order."""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.data.packing import Packed
from optimus.data.permutation import Permutation
from optimus.data.units import naming_damage, read_array
from optimus.disk import replace_text, replacing
from optimus.errors import UserError

PLAN = "plan.json"  # of the rows, which ends the packing

SUMS = ".crc32"  # of the rows of a shard, beside it
DIGEST = ".sha256"  # of a shard, written last

_LEAST = 32 << 20  # bytes of rows gathered at once, or more with more memory
_GAP = 64 << 10  # bytes between extents that are read together: as long as a seek on a fast disk
_SPAN = 8 << 20  # maximum bytes of a read
_AHEAD = 64  # reads that the system is told of in advance


class Stream(NamedTuple):
    """The first `tokens` of a file."""

    path: Path
    tokens: int


class _Extents(NamedTuple):
    """The extents of one block of rows: `length` tokens from `source` of all streams go to `target`."""

    source: NDArray[np.int64]
    length: NDArray[np.int64]
    target: NDArray[np.int64]


def shard_writer(
    folder: Path,
    streams: Sequence[Stream],
    packed: Path | None,
    instances: int,
    context: int,
    dtype: str,
    eos_id: int,
    seed: int,
    memory: int,
) -> Callable[[str, int, int], None]:
    """Returns a function that writes output rows `start` to `stop - 1` as the NumPy file `name` in `folder`.

    Output row j is row p(j) of the streams, one after the other, or of the rows in the file `packed`; `seed` determines
    the permutation p of all `instances` rows. The function also writes the CRC-32 of each row to the file `name` +
    `SUMS`, and then the SHA-256 of the shard to `name` + `DIGEST`.
    """
    permutation = Permutation(instances, "shuffle", seed)
    row_bytes = context * np.dtype(dtype).itemsize
    rows = None if packed is None else read_packed(packed, packed.with_name(PLAN))

    def extents(row_N: NDArray[np.int64]) -> _Extents:
        target_N = np.arange(len(row_N)) * context
        if rows is None:
            return _Extents(row_N * context, np.full(len(row_N), context), target_N)
        count_N = rows.bounds_B[row_N + 1] - rows.bounds_B[row_N]
        number_D = np.arange(count_N.sum()) - np.repeat(np.cumsum(count_N) - count_N, count_N)
        piece_D = np.repeat(rows.bounds_B[row_N], count_N) + number_D
        length_D = np.asarray(rows.length_D[piece_D])
        behind_D = np.cumsum(length_D) - length_D
        first_D = np.repeat(np.cumsum(count_N) - count_N, count_N)
        return _Extents(
            np.asarray(rows.start_D[piece_D]), length_D, np.repeat(target_N, count_N) + behind_D - behind_D[first_D]
        )

    def write(name: str, start: int, stop: int) -> None:
        digest, sums_N = hashlib.sha256(), np.empty(stop - start, dtype="<u4")
        with StreamReader(streams, np.dtype(dtype).itemsize) as reader, replacing(folder / name) as shard:
            header = {"descr": dtype, "fortran_order": False, "shape": (stop - start, context)}
            np.lib.format.write_array_header_1_0(shard, header)
            shard.seek(0)
            digest.update(shard.read())
            at_once = max(1, max(_LEAST, memory // 4) // row_bytes)
            for first in range(start, stop, at_once):
                row_N = permutation(np.arange(first, min(first + at_once, stop)))
                block = np.full((len(row_N), context), eos_id, dtype=dtype)
                data = block.data.cast("B")
                reader.read(extents(row_N), data)
                ends = range(row_bytes, len(data) + 1, row_bytes)
                sums_N[first - start :][: len(row_N)] = [zlib.crc32(data[end - row_bytes : end]) for end in ends]
                digest.update(data)
                shard.write(data)
        with replacing(folder / f"{name}{SUMS}") as file:
            file.write(sums_N.tobytes())
        replace_text(folder / f"{name}{DIGEST}", digest.hexdigest())

    return write


class StreamReader:
    """Reads extents of several streams as if they were one, in the order of the disk."""

    def __init__(self, streams: Sequence[Stream], item: int) -> None:
        self._streams, self._item, self._open = streams, item, ExitStack()
        self._starts = np.array([0, *accumulate(stream.tokens for stream in streams)])
        self._files: dict[int, BinaryIO] = {}

    def __enter__(self) -> "StreamReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def values(self, start: int, stop: int, dtype: str) -> NDArray[Any]:
        """Returns items `start` to `stop - 1` [stop - start], which have the type `dtype`."""
        values_N = np.empty(stop - start, dtype)
        extents = _Extents(np.array([start]), np.array([stop - start]), np.array([0]))
        self.read(extents, values_N.data.cast("B"))
        return values_N

    def read(self, extents: _Extents, block: memoryview) -> None:
        """Copies the tokens of `extents` into the bytes of a block."""
        source, length, target = self._divided(extents)
        order = np.argsort(source, kind="stable")
        source, length, target = (array[order] for array in (source, length, target))
        stream_D = np.searchsorted(self._starts, source, side="right") - 1
        begin_D = (source - self._starts[stream_D]) * self._item
        end_D, target_D = begin_D + length * self._item, target * self._item
        spans = [*_spans(stream_D, begin_D, end_D)]
        for number, (first, last) in enumerate(spans):
            for later in spans[number + _AHEAD - 1 : number + _AHEAD] if number else spans[:_AHEAD]:
                self._announce(int(stream_D[later[0]]), int(begin_D[later[0]]), int(end_D[later[1] - 1]))
            start = int(begin_D[first])
            data = self._bytes(int(stream_D[first]), start, int(end_D[last - 1]))
            for begin, end, to in zip(
                (begin_D[first:last] - start).tolist(),
                (end_D[first:last] - start).tolist(),
                target_D[first:last].tolist(),
            ):
                block[to : to + end - begin] = data[begin:end]

    def _divided(self, extents: _Extents) -> _Extents:
        """Divides extents at the borders of streams."""
        while True:
            stream_D = np.searchsorted(self._starts, extents.source, side="right") - 1
            over_D = extents.source + extents.length - self._starts[stream_D + 1]
            across = np.flatnonzero(over_D > 0)
            if not len(across):
                return extents
            length = extents.length.copy()
            length[across] -= over_D[across]
            extents = _Extents(
                np.append(extents.source, extents.source[across] + length[across]),
                np.append(length, over_D[across]),
                np.append(extents.target, extents.target[across] + length[across]),
            )

    def _file(self, stream: int) -> int:
        if stream not in self._files:
            self._files[stream] = self._open.enter_context(self._streams[stream].path.open("rb", buffering=0))
        return self._files[stream].fileno()

    def _announce(self, stream: int, start: int, stop: int) -> None:
        os.posix_fadvise(self._file(stream), start, stop - start, os.POSIX_FADV_WILLNEED)

    def _bytes(self, stream: int, start: int, stop: int) -> memoryview:
        data = bytearray()
        while len(data) < stop - start:
            part = os.pread(self._file(stream), stop - start - len(data), start + len(data))
            if not part:
                path = self._streams[stream].path
                raise UserError(f"{path} ends before byte {stop}: it is damaged. Delete {path.parent} and run again.")
            if len(part) == stop - start:
                return memoryview(part)
            data += part
        return memoryview(data)


def _spans(
    stream_D: NDArray[np.int64], begin_D: NDArray[np.int64], end_D: NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """Yields ranges of sorted extents to be read together: neighbours in one stream, with small gaps."""
    apart = (np.diff(stream_D) != 0) | (begin_D[1:] - end_D[:-1] > _GAP)
    borders = [0, *(np.flatnonzero(apart) + 1).tolist(), len(begin_D)]
    for first, last in pairwise(borders):
        while first < last:
            longest = int(np.searchsorted(end_D[first:last], begin_D[first] + _SPAN, side="right"))
            stop = first + max(1, longest)
            yield first, stop
            first = stop


def write_packed(path: Path, windows: Sequence[Packed]) -> None:
    """Writes the rows of all windows as one array [2 + B + 1 + 2 D]: the numbers of rows and of cut documents, then the
    arrays of `Packed`."""
    rows, pieces = sum(each.instances for each in windows), sum(len(each.start_D) for each in windows)
    header = {"descr": "<i8", "fortran_order": False, "shape": (2 + rows + 1 + 2 * pieces,)}
    before = accumulate((len(each.start_D) for each in windows), initial=0)
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for numbers in (
            [[rows, sum(each.cut_documents for each in windows), 0]],
            (each.bounds_B[1:] + first for each, first in zip(windows, before)),
            (each.start_D for each in windows),
            (each.length_D for each in windows),
        ):
            for each in numbers:
                file.write(np.asarray(each, "<i8").tobytes())


def read_packed(path: Path, marker: Path) -> Packed:
    """Opens rows that the unit with this `marker` wrote. Raises `UserError` for a damaged file."""
    array = read_array(path, marker)
    with naming_damage(path, marker):
        rows, cut = (int(number) for number in array[:2])
        start_D, length_D = array[2 + rows + 1 :].reshape(2, -1)
        return Packed(array[2 : 2 + rows + 1], start_D, length_D, cut)
