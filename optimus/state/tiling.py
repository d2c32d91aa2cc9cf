"""Divides chunks among ranks and into the tiles of an optimizer step: at aligned elements, or between whole matrices.

Each update rule names its tiling (`optim.rule.Rule.tiling`).
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
    """The properties of a chunk that a tiling needs, for example of a `plan.ChunkPlan`."""

    @property
    def align(self) -> int:
        """The alignment in elements. A flat tiling makes the lengths of shards multiples of this number."""

    @property
    def shard(self) -> slice:
        """This rank's shard."""

    @property
    def slots(self) -> Sequence[Any]:
        """The contiguous parameters, each a `plan.ParameterSlot`."""


class Tiling:
    """Divides at aligned elements: shards have equal length."""

    equal: ClassVar[bool] = True  # True if all shards have the same length

    def split_axes(self, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
        """Returns the mesh axes over which the rows or columns of a matrix are split: ranks along these axes update
        each matrix together. A flat tiling has none of these axes."""
        return ()

    def matrices(self, start: int, shape: Sequence[int], global_shape: Sequence[int]) -> list[Matrices]:
        """Returns the matrices of a parameter that must stay whole; a flat tiling has none.

        The parameter begins at element `start`, and has the local `shape` and the `global_shape`.
        """
        return []

    def borders(self, contents: Sequence[Matrices], size: int, loads: list[int], align: int) -> Sequence[int]:
        """Returns the borders of the shards of a chunk of `size` elements with the matrices `contents`, one shard for
        each of `loads`.

        `loads` are the costs of the matrices that each shard's rank already updates. `OfMatrices` adds the costs of the new
        matrices.
        """
        length = aligned(-(-size // len(loads)), align)
        return range(0, length * len(loads) + 1, length) if length else (0,) * (len(loads) + 1)

    def tiles(
        self, plan: Divided, blocks: Mapping[str, OverBlocks], buffers: Sequence[Tensor], size: int
    ) -> Iterator[tuple[MatrixFunction, Sequence[Tensor]]]:
        """Yields tiles of `buffers`: a function that applies a matrix function to a tile, and one part of each buffer.

        `buffers` hold this rank's shard of a chunk. Each part has about `size` elements. Until the next iteration, the
        caller may change all parts except the second, the gradient.

        The method rounds tile sizes up to multiples of `plan.align`, so that the rounding of a fused update does not
        depend on the tile size.
        """
        for parts in zip(*(buffer.split(aligned(size, plan.align)) for buffer in buffers)):
            yield local_matrices, parts


class OfMatrices(Tiling):
    """Divides between matrices. A shard, or a tile, consists of whole matrices, or of whole blocks of split
    matrices."""

    equal: ClassVar[bool] = False

    def split_axes(self, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
        """See `Tiling.split_axes`."""
        return split_axes(layout, mesh)

    def matrices(self, start: int, shape: Sequence[int], global_shape: Sequence[int]) -> list[Matrices]:
        """See `Tiling.matrices`. Raises `ValueError` for a vector."""
        return [Matrices.from_shape(start, shape, global_shape)]

    def borders(self, contents: Sequence[Matrices], size: int, loads: list[int], align: int) -> Sequence[int]:
        """See `Tiling.borders`."""
        return borders(contents, size, loads)

    def tiles(
        self, plan: Divided, blocks: Mapping[str, OverBlocks], buffers: Sequence[Tensor], size: int
    ) -> Iterator[tuple[MatrixFunction, Sequence[Tensor]]]:
        """Yields tiles like `Tiling.tiles`: each tile holds matrices of one shape.

        For matrices that are split into `blocks` over ranks, a tile may combine several parameters. These tiles are
        copies, which the method copies back.
        """
        part, split = plan.shard, dict[tuple[object, ...], tuple[OverBlocks, Matrices, list[int]]]()
        for slot in plan.slots:
            found = Matrices.from_shape(slot.start, slot.shape)
            numbers = found.within(part.start, part.stop)
            first = found.start - part.start
            if (over := blocks.get(slot.name)) is not None:
                *_, starts = split.setdefault((over.how, found.rows, found.columns), (over, found, []))
                starts += [first + number * found.size for number in numbers]
                continue
            for some in _batches(numbers, max(1, size // found.size)):
                here = slice(first + some[0] * found.size, first + (some[-1] + 1) * found.size)
                yield local_matrices, [buffer[here].view(-1, found.rows, found.columns) for buffer in buffers]
        for over, each, starts in split.values():
            for those in _batches(starts, max(over.ranks, size // each.size)):  # at least one matrix for each rank
                views = [[buffer[at : at + each.size].view(each.rows, -1) for at in those] for buffer in buffers]
                copies = [torch.stack(view) for view in views]
                yield over, copies
                for number, (view, made) in enumerate(zip(views, copies)):
                    if number != 1:
                        torch._foreach_copy_(view, [*made])


def _batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[first : first + size] for first in range(0, len(numbers), size))


TILINGS: Mapping[TilingName, Tiling] = {"flat": Tiling(), "matrices": OfMatrices()}
