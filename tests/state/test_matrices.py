"""Shards that end at borders of matrices, functions of whole matrices whose blocks lie on ranks, and their update
rules."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from optimus.comm import Groups
from optimus.mesh import Layout, Mesh
from optimus.state.matrices import Matrices, OverBlocks, borders, split_axes
from optimus.testing import run_ranks


def best_split(costs: Sequence[int], loads: Sequence[int]) -> int:
    """Returns the smallest possible cost of the fullest part, over all ways to give each part consecutive matrices."""
    found = []
    for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), len(loads) - 1):
        ends = [0, *cuts, len(costs)]
        found.append(max(load + sum(costs[a:b]) for load, (a, b) in zip(loads, itertools.pairwise(ends))))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_borders_share_out_the_work(seed: int) -> None:
    draw = random.Random(seed)
    contents, end = [], 0
    for _ in range(draw.randint(1, 4)):
        shape = [draw.randint(1, 3), *draw.choices((4, 8, 16, 48), k=2)]
        contents.append(Matrices.from_shape(end, shape))
        end += -(-shape[0] * shape[1] * shape[2] // 32) * 32
    loads = [draw.randint(0, 20_000) for _ in range(draw.randint(1, 5))]
    costs = [each.cost for each in contents for _ in range(each.number)]
    best, before = best_split(costs, loads), list(loads)
    found = borders(contents, end, loads)
    assert (found[0], found[-1], len(found)) == (0, end, len(loads) + 1)
    assert list(found) == sorted(found)
    taken = [[len(each.within(*part)) * each.cost for each in contents] for part in itertools.pairwise(found)]
    assert [load + sum(costs) for load, costs in zip(before, taken)] == loads
    assert sum(map(sum, taken)) == sum(costs)  # no matrix is split or lost
    assert max(loads) == best


def test_who_has_nothing_comes_next() -> None:
    """Ranks without a matrix of one chunk get more of the next chunk."""
    loads = [0] * 4
    first = borders([Matrices.from_shape(0, (3, 8, 8))], 192, loads)
    assert sorted(loads) == [0, *[Matrices.from_shape(0, (8, 8)).cost] * 3]
    idle = loads.index(0)
    second = borders([Matrices.from_shape(0, (8, 8))], 64, loads)
    assert (second[idle], second[idle + 1]) == (0, 64)
    assert len(set(loads)) == 1
    assert first[idle] == first[idle + 1]


def test_a_block_costs_its_share_of_the_whole() -> None:
    assert Matrices.from_shape(0, (5, 8, 12)).cost == 8 * 8 * (2 * 12 + 8)
    assert Matrices.from_shape(0, (5, 4, 6), (5, 8, 12)).cost * 4 == Matrices.from_shape(0, (5, 8, 12)).cost


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"a parameter of shape \[7\] is not a matrix"):
        Matrices.from_shape(0, (7,))


def of_whole(x_NRC: Tensor) -> Tensor:
    """A function of whose results each element depends on all of its matrix."""
    return (x_NRC @ x_NRC.mT @ x_NRC).double().cumsum(-1).cumsum(-2)


def blocks_of(mesh: Mesh, layout: Layout) -> tuple[Tensor, Tensor]:
    """Returns (the function applied to this rank's blocks, this rank's blocks of the function of the whole)."""
    groups = Groups(mesh)
    region = layout.region(mesh, groups.rank)
    x = torch.randn(*layout.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = x[region].flatten(0, -3)
    return OverBlocks(groups, layout)(of_whole, own), of_whole(x)[region].flatten(0, -3)


@pytest.mark.parametrize(
    ("mesh", "shape", "splits"),
    [
        (Mesh.from_sizes(4, tensor=(4, 1)), (3, 8, 6), ((1, "tp_out"),)),  # fewer matrices than ranks
        (Mesh.from_sizes(4, tensor=(4, 1)), (2, 3, 6, 8), ((3, "tp_out"),)),
        (Mesh.from_sizes(4, tensor=(2, 2)), (5, 8, 6), ((1, "tp_out"), (2, "tp_in"))),
        (Mesh.from_sizes(4, tensor=(2, 2)), (1, 4, 8), ((1, "tp_in"), (2, "tp_out"))),
        (Mesh.from_sizes(4, expert=2, expert_tensor=2), (6, 4, 10), ((0, "ep"), (2, "etp"))),
    ],
    ids=str,
)
def test_blocks_of_whole_matrices(mesh: Mesh, shape: tuple[int, ...], splits: tuple[tuple[int, str], ...]) -> None:
    layout = Layout(shape, splits)
    assert set(split_axes(layout, mesh)) == {axis for dim, axis in splits if dim >= len(shape) - 2}
    for found, right in run_ranks(blocks_of, 4, mesh, layout):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-9)
