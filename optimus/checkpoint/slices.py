"""Parts of flat buffers as slices of global tensors: how state is described to whoever writes it, reads it or compares it.

A contiguous range of a row-major block of d dims is at most 2d - 1 slices, each contiguous itself. So every rank's part of a
chunk, whatever its borders, is a few slices per parameter, and what one layout has written another can read.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from optimus.state.chunk import Chunk
from optimus.state.plan import ChunkPlan

LONGEST = 1 << 23  # elements of a slice: a reader must take the whole of each slice that it needs anything of


class TensorSlice(NamedTuple):
    """A part of the global tensor `key`, of `shape`: what lies there from `offsets` on, in `tensor`'s shape."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor  # a view of a flat buffer


def part_slices(chunk: Chunk, kind: str, part: Tensor) -> Iterator[TensorSlice]:
    """The slices of this rank's part of a chunk, or a copy of it; zero where it is pruned."""
    return slices(chunk.plan, kind, chunk.dense_part(part), first=chunk.dense_extent.start)


def slices(
    plan: ChunkPlan, kind: str, buffer: Tensor, longest: int = LONGEST, *, first: int = 0
) -> Iterator[TensorSlice]:
    """The slices of a flat `buffer`, which has the elements of a chunk from `first` on.

    `kind` is the prefix of their keys. The padding between parameters is in no slice.
    """
    for slot in plan.slots:
        start, end = max(slot.start, first), min(slot.end, first + len(buffer))
        for offsets, sizes in _capped(slot.shape, start - slot.start, end - slot.start, longest):
            length = math.prod(sizes)
            view = buffer[start - first : start - first + length].view(sizes)
            place = tuple(part.start + offset for part, offset in zip(slot.region, offsets))
            yield TensorSlice(f"{kind}.{slot.name}", slot.layout.shape, place, view)
            start += length


def whole_slices(tensors: Iterable[tuple[str, Tensor]], prefix: str = "model.") -> Iterator[TensorSlice]:
    """The slices of whole tensors, by their names behind `prefix`."""
    for name, tensor in tensors:
        yield TensorSlice(prefix + name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def tiles(shape: Sequence[int], longest: int = LONGEST) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the slices that a whole tensor is cut into, none of more than `longest` elements."""
    return _capped(shape, 0, math.prod(shape), longest)


def range_slices(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the slices that elements `start` to `end` of a row-major block are, in order; none if empty."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # rows of which everything is there
    if first > last:  # begins and ends in one row
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
    """The slices of a range, none of more than `longest` elements: it is cut first, at whole rows where they are short."""
    if start >= end:  # of a tensor without elements, too, whose rows have none
        return
    row = next(size for size in (math.prod(shape[dim:]) for dim in range(len(shape) + 1)) if size <= longest)
    step = longest // row * row
    while start < end:
        cut = min(end, (start // step + 1) * step)
        yield from range_slices(shape, start, cut)
        start = cut
