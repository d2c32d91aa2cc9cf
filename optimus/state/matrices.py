"""Divides chunks at the borders of matrices, and applies functions to matrices whose blocks lie on several ranks.

A parameter [..., R, C] consists of matrices of its last two dims.

Legend: N matrices; R rows and C columns of a whole matrix; r rows and c columns of this rank's block.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from optimus.comm import Groups
from optimus.mesh import Layout, Mesh


class Matrices(NamedTuple):
    """Matrices, or blocks of matrices, that are contiguous from element `start` of a chunk."""

    start: int
    number: int
    rows: int
    columns: int
    cost: int  # multiplications to orthogonalize one matrix, per step; a block has a share by its size

    @classmethod
    def from_shape(cls, start: int, shape: Sequence[int], global_shape: Sequence[int] | None = None) -> "Matrices":
        """Returns the matrices of a parameter with local `shape`. Raises `ValueError` for fewer than two dims.

        The cost counts the matmuls A = X X^T, A A and P X, where P is a polynomial in A.
        """
        if len(shape) < 2:
            raise ValueError(f"a parameter of shape {list(shape)} is not a matrix")
        *batch, rows, columns = shape
        short, long = sorted((global_shape or shape)[-2:])
        return cls(start, math.prod(batch), rows, columns, short * (2 * long + short) * rows * columns // long)

    @property
    def size(self) -> int:
        """The number of elements of one matrix or block."""
        return self.rows * self.columns

    def within(self, start: int, end: int) -> range:
        """Returns the indices of the matrices that begin at elements [`start`, `end`) of the chunk."""
        first, last = (-(-(each - self.start) // self.size) for each in (start, end))
        return range(max(0, first), max(0, min(self.number, last)))


def borders(contents: Sequence[Matrices], size: int, loads: list[int]) -> tuple[int, ...]:
    """Divides a chunk of `size` elements into `len(loads)` shards, and returns the `len(loads) + 1` borders.

    `loads` has the matrix cost of each shard's rank in earlier chunks. The function adds the new costs to `loads`.
    """
    costs = [each.cost for each in contents for _ in range(each.number)]
    starts = [each.start + i * each.size for each in contents for i in range(each.number)]
    low, high = max(loads), max(loads) + sum(costs)
    while low < high:
        middle = (low + high) // 2
        if sum(_taken(costs, loads, middle)) == len(costs):
            high = middle
        else:
            low = middle + 1
    found, done = [0], 0
    for part, number in enumerate(_taken(costs, loads, high)):
        loads[part] += sum(costs[done : done + number])
        done += number
        found.append(starts[done] if 0 < done < len(starts) else size if done else 0)
    return tuple(found)


def _taken(costs: Sequence[int], loads: Sequence[int], limit: int) -> list[int]:
    """Returns the number of matrices that each shard gets, in order, such that no load exceeds `limit`; some matrices
    may remain."""
    taken, done = [], 0
    for load in loads:
        first = done
        while done < len(costs) and load + costs[done] <= limit:
            load += costs[done]
            done += 1
        taken.append(done - first)
    return taken


def split_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes over which rows or columns of a parameter's matrices are split."""
    return tuple(axis for dim, axis in layout.sharded_dims if dim >= len(layout.shape) - 2 and mesh.axis_size(axis) > 1)


class OverBlocks:
    """Applies a function to matrices whose blocks lie on the ranks of a group."""

    def __init__(self, groups: Groups, layout: Layout) -> None:
        axes = split_axes(layout, groups.mesh)
        self._group = groups.along(*axes)
        offsets = [tuple(part.start for part in layout.region(groups.mesh, rank)[-2:]) for rank in self._group.ranks]
        # The ranks in row-major order of their blocks.
        self._order = sorted(range(self._group.size), key=offsets.__getitem__)
        self._inverse_order = sorted(range(self._group.size), key=self._order.__getitem__)
        self._down = len({row for row, _ in offsets})
        self.ranks = self._group.size

    @property
    def how(self) -> tuple[object, ...]:
        """The assignment of blocks to ranks; parameters with equal assignments and blocks of equal shape can share an
        all-to-all."""
        return *self._group.ranks, *self._order, self._down

    def __call__(self, function: Callable[[Tensor], Tensor], x_Nrc: Tensor) -> Tensor:
        """Applies `function` to the whole matrices, and returns this rank's blocks of the results. All ranks of the
        group must call this method."""
        number, r, c = x_Nrc.shape
        ranks = self.ranks
        across = ranks // self._down
        share = [(number + i) // ranks for i in range(ranks)]
        own = share[self._group.rank]
        blocks = self._group.all_to_all(x_Nrc, share, [own] * ranks).view(ranks, own, r, c)[self._order]
        full_NRC = (
            blocks.view(self._down, across, own, r, c).permute(2, 0, 3, 1, 4).reshape(own, self._down * r, across * c)
        )
        made = function(full_NRC).view(own, self._down, r, across, c)
        blocks = made.permute(1, 3, 0, 2, 4).reshape(ranks, own, r, c)[self._inverse_order]
        return self._group.all_to_all(blocks.flatten(0, 1), [own] * ranks, share)
