"""A partition of all ranks into groups."""

import random

import pytest

from optimus.mesh import Mesh, RankPartition


def test_groups_in_any_order_are_the_same_division() -> None:
    groups = [[0, 3, 6], [1], [2], [4, 7], [5]]
    shuffled = random.Random(0).sample(groups, len(groups))
    partition = RankPartition.from_groups(groups)
    assert partition == RankPartition.from_groups(shuffled)
    assert hash(partition) == hash(RankPartition.from_groups(shuffled))
    assert partition != RankPartition.from_groups([[0, 6, 3], [1], [2], [4, 7], [5]])  # ranks of a group have positions
    assert list(partition) == [[1], [2], [5], [4, 7], [0, 3, 6]]
    assert (len(partition), partition.largest) == (5, 3)
    assert [partition.group(rank) for rank in (6, 2, 4)] == [[0, 3, 6], [2], [4, 7]]
    assert [partition.size_of(rank) for rank in (6, 2, 4)] == [3, 1, 2]
    with pytest.raises(ValueError, match="rank 8 is in none"):
        partition.group(8)


def test_groups_are_cut_together() -> None:
    halves = Mesh(dp=4, tp=2).groups(("dp",)).cut(lambda ranks_GR: ranks_GR.reshape(-1, 2))
    assert list(halves) == [[0, 2], [1, 3], [4, 6], [5, 7]]
