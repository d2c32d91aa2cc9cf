"""Divides chunks into shards, and shards into the tiles of an optimizer step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from optimus.mesh import Layout, Mesh
from optimus.optim.rule import MatrixFunction, TilingName, local_matrices
from optimus.state.buffers import aligned
from optimus.state.matrices import Matrices, OverBlocks, borders, split_axes


class Divided(Protocol):
    """The properties of a chunk that a tiling needs."""

    @property
    def align(self) -> int:
        """Shards and tiles of a flat tiling begin at multiples of this number of elements."""

    @property
    def shard(self) -> slice:
        """This rank's shard."""

    @property
    def slots(self) -> Sequence[Any]:
        """The `ParameterSlot`s of the chunk."""


class Tiling:
    """Divides at aligned elements: shards have equal length."""

    equal: ClassVar[bool] = True
    in_order: ClassVar[bool] = True  # True if the tiles follow one another from the first element to the last

    def split_axes(self, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
        """Returns the mesh axes over which the rows or columns of matrices are split; none for a flat tiling."""
        return ()

    def matrices(self, start: int, shape: Sequence[int], global_shape: Sequence[int]) -> list[Matrices]:
        """Returns a parameter's local matrices, which shards must not split; none for a flat tiling."""
        return []

    def borders(self, contents: Sequence[Matrices], size: int, loads: list[int], align: int) -> Sequence[int]:
        """Returns the positions where a chunk's shards begin, and the position where the last shard ends.

        The chunk has `size` elements, the matrices `contents`, and one shard for each of `loads`. Shards of a flat
        tiling may end after `size`.

        `loads` counts, for each shard's rank, the multiplications to orthogonalize its matrices in earlier chunks.
        `OfMatrices` adds the multiplications for this chunk.
        """
        length = aligned(-(-size // len(loads)), align)
        return range(0, length * len(loads) + 1, length) if length else (0,) * (len(loads) + 1)

    def tiles(
        self, plan: Divided, blocks: Mapping[str, OverBlocks], buffers: Sequence[Tensor], size: int
    ) -> Iterator[tuple[MatrixFunction, Sequence[Tensor]]]:
        """Yields (`Tile.matrix_function`, parts of all buffers) for each tile of `buffers`.

        `size` is the target number of elements of a part. Until the next iteration, the caller may change all parts
        except the second, the gradient.
        """
        for parts in zip(*(buffer.split(aligned(size, plan.align)) for buffer in buffers)):
            yield local_matrices, parts


class OfMatrices(Tiling):
    """Divides between matrices, or between the blocks of split matrices."""

    equal: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    def split_axes(self, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
        """See `Tiling.split_axes`."""
        return split_axes(layout, mesh)

    def matrices(self, start: int, shape: Sequence[int], global_shape: Sequence[int]) -> list[Matrices]:
        """See `Tiling.matrices`. Raises `ValueError` for fewer than two dims."""
        return [Matrices.from_shape(start, shape, global_shape)]

    def borders(self, contents: Sequence[Matrices], size: int, loads: list[int], align: int) -> Sequence[int]:
        """See `Tiling.borders`."""
        return borders(contents, size, loads)

    def tiles(
        self, plan: Divided, blocks: Mapping[str, OverBlocks], buffers: Sequence[Tensor], size: int
    ) -> Iterator[tuple[MatrixFunction, Sequence[Tensor]]]:
        """See `Tiling.tiles`. Copies tiles of the parameters in `blocks`, and copies all but the gradient back."""
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
            for those in _batches(starts, max(over.ranks, size // each.size)):  # a matrix for every rank, if possible
                views = [[buffer[at : at + each.size].view(each.rows, -1) for at in those] for buffer in buffers]
                copies = [torch.stack(view) for view in views]
                yield over, copies
                for number, (view, made) in enumerate(zip(views, copies)):
                    if number != 1:
                        torch._foreach_copy_(view, [*made])


def _batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[first : first + size] for first in range(0, len(numbers), size))


TILINGS: Mapping[TilingName, Tiling] = {"flat": Tiling(), "matrices": OfMatrices()}
