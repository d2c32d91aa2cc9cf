"""How chunks are divided, among ranks and into the tiles of an optimizer step: at any element, or between whole matrices.

Each update rule names its way (`optim.rule.Rule.tiling`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from optimus.mesh import Layout, Mesh
from optimus.optim.rule import MatrixFunction, TilingName, local_matrices
from optimus.state.buffers import aligned
from optimus.state.matrices import Matrices, OverBlocks, borders, split_axes


class Divided(Protocol):
    """What is asked of a chunk: `plan.ChunkPlan`."""

    @property
    def align(self) -> int:
        """Elements of which parts are multiples."""

    @property
    def shard(self) -> slice:
        """This rank's part."""

    @property
    def slots(self) -> Sequence[Any]:
        """The parameters, end to end: `plan.Slot`."""


class Tiling:
    """At any element: shards are of equal length."""

    equal: ClassVar[bool] = True  # so that one says what each of them has

    def split_axes(self, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
        """The axes over which what a rule works on is split: ranks along them update it together."""
        return ()

    def matrices(self, start: int, shape: Sequence[int], whole: Sequence[int]) -> list[Matrices]:
        """What of a parameter stays whole. It begins at element `start`, and has `shape` on this rank, of the `whole`."""
        return []

    def borders(self, contents: Sequence[Matrices], size: int, loads: list[int], align: int) -> Sequence[int]:
        """Where the shards of a chunk begin and end, one for each of `loads`, what it has to compute already: these are
        raised. The `contents` fill `size` elements."""
        length = aligned(-(-size // len(loads)), align)
        return range(0, length * len(loads) + 1, length) if length else (0,) * (len(loads) + 1)

    def tiles(
        self, plan: Divided, blocks: Mapping[str, OverBlocks], buffers: Sequence[Tensor], size: int
    ) -> Iterator[tuple[MatrixFunction, Sequence[Tensor]]]:
        """Parts of `buffers`, which hold this rank's part of a chunk, about `size` elements each, and how a function of
        matrices is applied to them. All but the second may be changed until the next is asked for.

        Elements are rounded up to whole vectors: those behind the last whole one are rounded otherwise by a fused update,
        and the numbers must not depend on the tile.
        """
        for parts in zip(*(buffer.split(aligned(size, plan.align)) for buffer in buffers)):
            yield local_matrices, parts


class OfMatrices(Tiling):
    """Between matrices: a shard, and a tile, is some of them."""

    equal: ClassVar[bool] = False

    def split_axes(self, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
        """As `Tiling`."""
        return split_axes(layout, mesh)

    def matrices(self, start: int, shape: Sequence[int], whole: Sequence[int]) -> list[Matrices]:
        """As `Tiling`. Raises `ValueError` for a vector."""
        return [Matrices.of(start, shape, whole)]

    def borders(self, contents: Sequence[Matrices], size: int, loads: list[int], align: int) -> Sequence[int]:
        """As `Tiling`."""
        return borders(contents, size, loads)

    def tiles(
        self, plan: Divided, blocks: Mapping[str, OverBlocks], buffers: Sequence[Tensor], size: int
    ) -> Iterator[tuple[MatrixFunction, Sequence[Tensor]]]:
        """As `Tiling`: matrices of one shape. Those of which ranks have `blocks`, by parameter, come together, whatever
        parameters they are of: copies, as they lie apart."""
        part, split = plan.shard, dict[tuple[object, ...], tuple[OverBlocks, Matrices, list[int]]]()
        for slot in plan.slots:
            found = Matrices.of(slot.start, slot.shape)
            numbers = found.within(part.start, part.stop)
            first = found.start - part.start
            if (over := blocks.get(slot.name)) is not None:
                *_, places = split.setdefault((over.how, found.rows, found.columns), (over, found, []))
                places += [first + number * found.size for number in numbers]
                continue
            for some in _batches(numbers, max(1, size // found.size)):
                here = slice(first + some[0] * found.size, first + (some[-1] + 1) * found.size)
                yield local_matrices, [buffer[here].view(-1, found.rows, found.columns) for buffer in buffers]
        for over, each, places in split.values():
            for those in _batches(places, max(over.ranks, size // each.size)):  # one for each rank at least
                views = [[buffer[at : at + each.size].view(each.rows, -1) for at in those] for buffer in buffers]
                copies = [torch.stack(view) for view in views]
                yield over, copies
                for number, (view, made) in enumerate(zip(views, copies)):
                    if number != 1:
                        torch._foreach_copy_(view, [*made])


def _batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[first : first + size] for first in range(0, len(numbers), size))


TILINGS: Mapping[TilingName, Tiling] = {"flat": Tiling(), "matrices": OfMatrices()}
