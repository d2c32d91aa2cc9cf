"""Collectives on groups along the axes of a mesh, and on a group of one."""

import pytest
import torch

from optimus.comm import Group, Groups
from optimus.mesh import Mesh
from optimus.testing import run_ranks

MESH = Mesh(dp=4, ep=2)
CPU = torch.device("cpu")


def along(axes: tuple[str, ...]) -> tuple[list[int], int, float, list[float], list[float], bool]:
    groups = Groups(MESH)
    group = groups.along(*axes)
    assert group is groups.along(*axes)  # made once
    mean = torch.tensor([float(groups.rank)])
    group.average(mean)
    part = slice(2 * group.rank, 2 * group.rank + 2)
    scattered = torch.ones(2)
    group.start_average_part(torch.arange(2.0 * group.size) + groups.rank, part, scattered)()
    whole = torch.zeros(2 * group.size)
    whole[part] = float(groups.rank)
    group.gather_parts(whole, whole[part])
    some = group.any(groups.rank == 3, CPU)
    return group.ranks, group.rank, mean.item(), scattered.tolist(), whole.tolist(), some


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("edp",), {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}),
        (("ep",), {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}),
        (("dp", "cp"), {rank: [0, 1, 2, 3] for rank in range(4)}),
        (("tp",), {rank: [rank] for rank in range(4)}),
    ],
)
def test_collectives_reach_the_ranks_of_the_group(axes: tuple[str, ...], expected: dict[int, list[int]]) -> None:
    for rank, (ranks, place, mean, scattered, whole, some) in enumerate(run_ranks(along, 4, axes)):
        assert ranks == expected[rank]
        assert ranks[place] == rank
        middle = sum(ranks) / len(ranks)
        assert mean == middle
        assert scattered == [1 + 2 * place + middle, 2 + 2 * place + middle]  # added to what was there
        assert whole == [float(r) for r in ranks for _ in range(2)]
        assert some == (3 in ranks)


def test_a_group_of_one_needs_no_process_group() -> None:
    group = Groups(Mesh()).world
    assert (group.ranks, group.size, group.rank) == ([0], 1, 0)
    value, out = torch.tensor([5.0]), torch.zeros(1)
    group.average(value)
    group.sum(value)
    group.broadcast(value)
    group.start_average_part(value, slice(0, 1), out)()
    whole = torch.zeros(1)
    Group([0], 0).gather_parts(whole, value)
    assert value.item() == out.item() == whole.item() == 5.0
    assert not group.any(False, CPU)
