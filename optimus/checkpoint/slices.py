"""Divides shards of flat buffers, and unsharded tensors, into slices of global tensors."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from optimus.state.chunk import Chunk
from optimus.state.plan import ChunkPlan

# Default maximum number of elements of a slice.
LONGEST = 1 << 23


class TensorSlice(NamedTuple):
    """A region of the global tensor `key`. The region starts at `offsets`, and has the shape of `tensor`."""

    key: str
    shape: tuple[int, ...]  # of the global tensor
    offsets: tuple[int, ...]
    tensor: Tensor  # for a shard, a view of a flat buffer


def part_slices(chunk: Chunk, kind: str, part: Tensor) -> Iterator[TensorSlice]:
    """Yields the slices of `part`, this rank's shard of a chunk or a copy of the shard. Pruned elements are zero."""
    return slices(chunk.plan, kind, chunk.dense_part(part), first=chunk.dense_extent.start)


def slices(
    plan: ChunkPlan, kind: str, buffer: Tensor, longest: int = LONGEST, *, first: int = 0
) -> Iterator[TensorSlice]:
    """Yields the slices of a flat `buffer`, which has the elements of a chunk from `first` on.

    `kind` is the prefix of the slices' keys. The slices exclude the padding between parameters.
    """
    for slot in plan.slots:
        start, end = max(slot.start, first), min(slot.end, first + len(buffer))
        for offsets, sizes in _capped(slot.shape, start - slot.start, end - slot.start, longest):
            length = math.prod(sizes)
            view = buffer[start - first : start - first + length].view(sizes)
            position = tuple(part.start + offset for part, offset in zip(slot.region, offsets))
            yield TensorSlice(f"{kind}.{slot.name}", slot.layout.shape, position, view)
            start += length


def full_slices(tensors: Iterable[tuple[str, Tensor]], prefix: str = "model.") -> Iterator[TensorSlice]:
    """Yields each tensor as one slice with the key `prefix` + name."""
    for name, tensor in tensors:
        yield TensorSlice(prefix + name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def tiles(shape: Sequence[int], longest: int = LONGEST) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields (offsets, sizes) of slices that cover a whole tensor, with at most `longest` elements each."""
    return _capped(shape, 0, math.prod(shape), longest)


def range_slices(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields (offsets, sizes) of slices that cover elements `start` to `end - 1` of a row-major block, in order."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # rows `first` to `last - 1` are complete
    if first > last:  # the range begins and ends inside one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], row: int, start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    first = row * math.prod(shape[1:])
    for offsets, sizes in range_slices(shape[1:], start - first, end - first):
        yield (row, *offsets), (1, *sizes)


def _capped(
    shape: Sequence[int], start: int, end: int, longest: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields (offsets, sizes) of slices that cover a range, with at most `longest` elements each."""
    if start >= end:
        return
    row = next(size for size in (math.prod(shape[dim:]) for dim in range(len(shape) + 1)) if size <= longest)
    step = longest // row * row
    while start < end:
        cut = min(end, (start // step + 1) * step)
        yield from range_slices(shape, start, cut)
        start = cut
