"""Collectives on groups along the axes of a mesh, and on a group of one rank."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from optimus.comm import Group, Groups, PlannedGroups
from optimus.comm.group import Shared
from optimus.comm.watch import Watch
from optimus.errors import UserError
from optimus.mesh import Mesh, RankPartition
from optimus.testing import run_ranks

MESH = Mesh(dp=4, ep=2)


def along(axes: tuple[str, ...]) -> tuple[list[int], int, float, list[float], list[float], bool]:
    groups = Groups(MESH)
    group = groups.along(*axes)
    assert group is groups.along(*axes)  # cached
    total = torch.tensor([float(groups.rank)])
    group.all_reduce(total)
    numbers, scattered = torch.arange(2.0 * group.size) + groups.rank, torch.ones(2)
    group.reduce_scatter_async(numbers.clone(), scattered).wait()
    part = slice(2 * group.rank, 2 * group.rank + 2)
    group.reduce_scatter_async(numbers, numbers[part]).wait()
    assert torch.equal(numbers[part], scattered)
    whole = torch.zeros(2 * group.size)
    whole[part] = float(groups.rank)
    group.all_gather(whole, whole[part])
    some = group.any(groups.rank == 3)
    return group.ranks, group.rank, total.item(), scattered.tolist(), whole.tolist(), some


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
    for rank, (ranks, place, total, scattered, whole, some) in enumerate(run_ranks(along, 4, axes)):
        assert ranks == expected[rank]
        assert ranks[place] == rank
        assert total == sum(ranks)
        assert scattered == [len(ranks) * 2 * place + total, len(ranks) * (2 * place + 1) + total]
        assert whole == [float(r) for r in ranks for _ in range(2)]
        assert some == (3 in ranks)


LENGTHS = [3, 0, 4, 1]


def in_unequal_parts() -> tuple[list[float], list[float]]:
    """Returns (this rank's shard of the sum, the tensor gathered from all shards)."""
    group = Groups(MESH).world
    numbers = torch.arange(8.0) * 10**group.rank
    part = numbers.split(LENGTHS)[group.rank]
    apart = torch.full_like(part, torch.nan)
    group.reduce_scatter_async(numbers.clone(), apart, LENGTHS).wait()
    group.reduce_scatter_async(numbers, part, LENGTHS).wait()
    assert torch.equal(part, apart)
    whole = torch.full((8,), torch.nan)
    group.all_gather_async(whole, part, LENGTHS).wait()
    within = torch.full((8,), torch.nan)
    here = within.split(LENGTHS)[group.rank]
    here.copy_(part)
    group.all_gather_async(within, here, LENGTHS).wait()
    assert torch.equal(within, whole)
    return part.tolist(), whole.tolist()


def test_parts_of_unequal_lengths() -> None:
    """Collectives handle shards of unequal lengths, also an empty one."""
    right = [1111.0 * number for number in range(8)]
    for rank, (part, whole) in enumerate(run_ranks(in_unequal_parts, 4)):
        assert part == right[sum(LENGTHS[:rank]) : sum(LENGTHS[: rank + 1])]
        assert whole == right


def given(lengths: list[int] | None) -> list[tuple[str, list[int]]]:
    """Returns the names of the collectives called on a backend other than Gloo, with the lengths of their tensors."""
    calls = []

    def noted(name: str) -> Any:
        def call(*args: Any, **options: Any) -> mock.Mock:
            many = next((arg for arg in args if isinstance(arg, list)), [])
            calls.append((name, [len(each) for each in many]))
            return mock.Mock()

        return call

    names = ["all_gather", "reduce_scatter", "all_gather_single", "reduce_scatter_single"]
    names += ["all_gather_into_tensor", "reduce_scatter_tensor"]
    with mock.patch.object(dist, "get_backend", return_value="another"), ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, noted(name), create=True))
        group, whole = Group(range(4), dist.get_rank()), torch.arange(8.0)
        part = whole.split(lengths or [2] * 4)[group.rank]
        group.reduce_scatter_async(whole, part, lengths).wait()
        group.all_gather_async(whole, part, lengths).wait()
    return calls


@pytest.mark.parametrize("lengths", [None, [2, 2, 2, 2], LENGTHS])
def test_unequal_parts_are_a_list_for_other_backends(lengths: list[int] | None) -> None:
    for calls in run_ranks(given, 4, lengths):
        if lengths == LENGTHS:
            assert calls == [("reduce_scatter", LENGTHS), ("all_gather", LENGTHS)]
        else:
            assert [name.removesuffix("_single") for name, _ in calls] == ["reduce_scatter", "all_gather"]


@pytest.mark.parametrize("length", [5, 2, 1])
def test_parts_without_lengths_are_equal(length: int) -> None:
    """A tensor that cannot be divided evenly is refused before any message."""
    group, whole = Group(range(4), 0), torch.zeros(length)
    for call in (group.reduce_scatter_async, group.all_gather_async):
        with pytest.raises(ValueError, match=rf"dim 0 has length {length}, which 4 ranks cannot divide evenly: give"):
            call(whole, torch.zeros(1))


def test_a_group_of_one_needs_no_process_group() -> None:
    group = Groups(Mesh()).world
    assert (group.ranks, group.size, group.rank) == ([0], 1, 0)
    value, out = torch.tensor([5.0]), torch.zeros(1)
    group.all_reduce(value)
    group.broadcast(value)
    group.reduce_scatter_async(value, out).wait()
    whole = torch.zeros(1)
    group.all_gather(whole, value)
    assert value.item() == out.item() == whole.item() == 5.0
    assert torch.equal(group.all_to_all(value, [1], [1]), value)
    for lengths in ({"send": [1]}, {"receive": [1]}):
        with pytest.raises(AssertionError, match="give both `send` and `receive`, or neither"):
            group.all_to_all(value, **lengths)
    assert not group.any(False)


def fails_on_first(error: BaseException) -> str:
    world = Groups(Mesh(dp=2)).world

    def call() -> None:
        raise error

    with pytest.raises(BaseException) as caught:  # noqa: PT011
        world.on_first(call)
    assert world.any(world.rank == 1)  # the ranks are still in step
    return repr(caught.value)


@pytest.mark.parametrize(
    "error", [UserError("no such file"), ZeroDivisionError("by zero"), SystemExit(3), KeyboardInterrupt()]
)
def test_all_ranks_learn_of_an_error_of_the_first(error: BaseException) -> None:
    first, second = run_ranks(fails_on_first, 2, error)
    assert first == repr(error)
    assert repr(error) in second
    assert second.startswith("UserError(")


def test_the_same_group_with_a_tag_is_watched_as_before() -> None:
    group = Group([0], 0, shared=Shared(watch=Watch()))
    assert group.tagged(1).watch is group.watch is not None
    assert group.unwatched.tagged(1).watch is None


def exchanged() -> list[float]:
    """Rank r sends the number r * 10 + s to each rank s, s times; returns the received numbers."""
    group = Groups(Mesh(dp=3)).world
    rows = torch.cat([torch.full((s, 1), 10.0 * group.rank + s) for s in range(3)])
    return group.all_to_all(rows, [0, 1, 2], [group.rank] * 3).flatten().tolist()


def test_an_uneven_exchange() -> None:
    assert run_ranks(exchanged, 3) == [[], [1.0, 11.0, 21.0], [2.0, 2.0, 12.0, 12.0, 22.0, 22.0]]


def shifted(axis: str) -> list[list[float]]:
    """Returns the numbers received in three simultaneous shifts of different lengths."""
    group = Groups(MESH).along(axis)
    sent = [torch.full((10**i,), 10.0 * i + group.rank) for i in range(3)]
    came = [torch.zeros_like(tensor) for tensor in sent]
    for handle in [group.shift_async(tensor, out) for tensor, out in zip(sent, came, strict=True)]:
        handle.wait()
    return [tensor.unique().tolist() for tensor in came]


@pytest.mark.parametrize(("axis", "size"), [("dp", 4), ("edp", 2), ("tp", 1)])
def test_a_shift_goes_to_the_next_rank(axis: str, size: int) -> None:
    for rank, came in enumerate(run_ranks(shifted, 4, axis)):
        place = MESH.group(rank, (axis,)).index(rank)
        assert came == [[10.0 * i + (place - 1) % size] for i in range(3)]


def divided() -> tuple[bool, int]:
    groups, other = Groups(MESH), RankPartition.from_groups([[0, 3], [1, 2]])
    same = groups.group_of(RankPartition.from_groups([[0, 2], [1, 3]])) is groups.along("edp")
    with pytest.raises(RuntimeError, match=r"has not created the groups \[(0, 3|1, 2)\]"):
        groups.group_of(other)
    groups.make([PlannedGroups("others", other)])
    return same, groups.group_of(other).ranks[-1]


def test_groups_of_the_same_ranks_are_shared() -> None:
    assert run_ranks(divided, 4) == [(True, 3), (True, 2), (True, 2), (True, 3)]


PARTITIONS = [  # of 8 ranks; in how many groups with others a rank is, differs
    RankPartition.from_groups([[0, 3, 6], [1], [2], [4, 7], [5]]),
    RankPartition.from_groups([[0], [1], [2], [3], [4], [5], [6], [7]]),
    RankPartition.from_groups([[0, 1], [2], [3], [4], [5], [6], [7]]),
    RankPartition.from_groups([[0, 7], [1, 2, 3, 4, 5, 6]]),
]


def unlike_groups() -> tuple[list[list[int]], list[tuple[list[int], float]]]:
    """Returns (the process groups that this rank creates, the ranks of each group with the sum over them)."""
    calls: list[list[int]] = []
    real = dist.new_group

    def noted(ranks: list[int], **options: Any) -> Any:
        calls.append(ranks)
        return real(ranks, **options)

    with mock.patch.object(dist, "new_group", noted):
        mesh = Mesh(pp=4, dp=2)
        along = {axis: mesh.groups((axis,)) for axis in ("embedding", "dp", "pp")}
        shared = [
            PlannedGroups("", parts) for parts in [PARTITIONS[0], along["embedding"], *PARTITIONS[1:], along["dp"]]
        ]
        groups = Groups(
            mesh, planned=[*shared, *(PlannedGroups("", along[axis], apart=2) for axis in ("pp", "embedding"))]
        )
        asked = [groups.group_of(PARTITIONS[0]), groups.along("embedding"), *map(groups.group_of, PARTITIONS[1:])]
        asked += [groups.along("dp"), *groups.apart(2, "pp"), *groups.apart(2, "embedding"), groups.world]
    sums = []
    for group in asked:
        total = torch.tensor([float(groups.rank)])
        group.all_reduce(total)
        sums.append((group.ranks, total.item()))
    return calls, sums


def test_a_rank_makes_the_groups_that_it_is_in() -> None:
    """A rank creates only the process groups that it is in. Ranks create different numbers of groups; members of a
    group still agree on its name."""
    found = run_ranks(unlike_groups, 8)
    for rank, (calls, sums) in enumerate(found):
        assert all(rank in ranks for ranks in calls)
        # The partition into groups of one needs no process group, and that of all ranks exists already.
        assert len(calls) == len(sums) - 2
        assert all(total == sum(ranks) for ranks, total in sums)
    assert len({sum(len(ranks) > 1 for ranks in calls) for calls, _ in found}) > 1


def long_sums(length: int) -> list[bool]:
    """Checks exact sums of bf16 numbers in two simultaneous all-reduces."""
    group = Groups(Mesh(dp=4)).world
    tensors = [torch.full((length // 8, 8), float(group.rank + 10 * i), dtype=torch.bfloat16) for i in range(2)]
    for handle in [group.all_reduce_async(tensor) for tensor in tensors]:
        handle.wait()
    return [bool((tensor == 6 + 40 * i).all()) for i, tensor in enumerate(tensors)]


@pytest.mark.parametrize("length", [64, 1 << 15, (1 << 15) + 8])
def test_sums_of_any_length(length: int) -> None:
    assert run_ranks(long_sums, 4, length) == [[True, True]] * 4
