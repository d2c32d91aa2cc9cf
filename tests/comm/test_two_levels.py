"""Every algorithm on ranks of several nodes gives exact sums, with the same bits on all ranks and in every call."""

import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers.another_backend import another_backend
from optimus.comm import Group, Groups
from optimus.comm.algorithms import KINDS, OWN, OWN_LEVELS, PIECE, CollectiveKind, Measured, names, on_two_levels
from optimus.comm.exchange import Rounded
from optimus.comm.schedules import Shape
from optimus.mesh import Mesh
from optimus.testing import run_ranks
from optimus.testing.traffic import counting

SUMS: list[CollectiveKind] = ["all_gather", "reduce_scatter", "all_reduce"]
SHAPES = [Shape(2, 2), Shape(2, 4), Shape(4, 2)]
LENGTHS = [3, 0, 5, 1, 0, 2, 7, 4]  # elements of the shards of eight ranks


def with_algorithms(kind: CollectiveKind) -> list[tuple[Shape, str]]:
    return [(shape, algorithm) for shape in SHAPES for algorithm in names(kind, shape)]


def only(algorithm: str, shape: Shape, *kinds: CollectiveKind) -> Measured:
    """Returns a table in which this algorithm alone is measured."""
    curves = {str(shape): {algorithm: {"sizes": [1.0], "seconds": [1.0]}}}
    return Measured.model_validate(dict.fromkeys(kinds, curves))


def world_of(shape: Shape, algorithm: str, **options: Any) -> Group:
    """Returns the group of all ranks, on the shape's nodes, whose collectives use the algorithm."""
    mesh = Mesh(dp=shape.ranks, ranks_per_node=shape.per)
    group = Groups(mesh, measured=only(algorithm, shape, *SUMS), **options).world
    assert group.shape == shape
    return group


def given(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def results(group: Group, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """Returns (name, result on this rank, right result) of each collective; right sums are in fp64."""
    n, rank, found = group.size, group.rank, []
    for lengths in ([1] * n, [1000] * n, LENGTHS[:n], [70_001 if place % 3 else 0 for place in range(n)]):
        size = sum(lengths)
        all_ = [given(each, size, dtype) for each in range(n)]
        total = torch.stack([each.double() for each in all_]).sum(0)
        mine = total.split(lengths)[rank]
        out = torch.empty(lengths[rank], dtype=dtype)
        group.reduce_scatter(all_[rank].clone(), out, lengths)
        found.append((f"reduce_scatter {lengths}", out, mine))
        within = all_[rank].clone()
        group.reduce_scatter_async(within, within.split(lengths)[rank], lengths).wait()
        assert torch.equal(within.split(lengths)[rank], out), "in place"
        whole = torch.full((size,), torch.nan, dtype=dtype)
        group.all_gather(whole, all_[rank].split(lengths)[rank], lengths)
        right = torch.cat([each.split(lengths)[place] for place, each in enumerate(all_)])
        found.append((f"all_gather {lengths}", whole, right.double()))
        sums = [all_[rank].clone() for _ in range(3)]
        for handle in [group.all_reduce_async(each) for each in sums[:2]]:
            handle.wait()
        group.all_reduce(sums[2])
        assert torch.equal(sums[0], sums[1]), "each time"
        assert torch.equal(sums[0], sums[2]), "each time"
        found.append((f"all_reduce {lengths}", sums[0], total))
    return found


def tried(
    shape: Shape, algorithm: str, dtype: torch.dtype, grouped: bool = False
) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Returns (names of wrong results, results that must be equal on all ranks, all results).

    With `grouped`, rounds are group calls, as over NCCL."""
    bound = {torch.bfloat16: 2**-8, torch.float32: 2**-20}[dtype]
    with another_backend() if grouped else nullcontext():
        found = results(world_of(shape, algorithm), dtype)
    wrong = [
        what for what, here, right in found if not torch.allclose(here.double(), right, rtol=bound, atol=4 * bound)
    ]
    alike = [here for what, here, _ in found if not what.startswith("reduce_scatter")]
    return wrong, alike, [here for _, here, _ in found]


@pytest.mark.swept("algorithm", "dtype", "shape")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "algorithm"), with_algorithms("all_gather"), ids=str)
def test_every_algorithm_is_right(shape: Shape, algorithm: str, dtype: torch.dtype) -> None:
    ranks = run_ranks(tried, shape.ranks, shape, algorithm, dtype)
    for wrong, alike, _ in ranks:
        assert wrong == []
        assert all(map(torch.equal, alike, ranks[0][1]))


@pytest.mark.swept("algorithm", "dtype", "shape")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "algorithm"), [each for each in with_algorithms("all_gather") if each[1] != OWN], ids=str
)
def test_group_calls_give_the_bits_of_messages_with_tags(shape: Shape, algorithm: str, dtype: torch.dtype) -> None:
    """The order of additions depends on the algorithm only, not on what carries the messages."""
    grouped, tagged = (run_ranks(tried, shape.ranks, shape, algorithm, dtype, each) for each in (True, False))
    for (wrong, alike, here), (_, _, right) in zip(grouped, tagged, strict=True):
        assert wrong == []
        assert all(map(torch.equal, alike, grouped[0][1]))
        assert all(map(torch.equal, here, right))


def exchanged(shape: Shape, algorithm: str, dtype: torch.dtype) -> list[int]:
    """Returns the shard sizes for which an all-to-all gave a wrong result; sizes include zero and several pieces."""
    mesh = Mesh(dp=shape.ranks, ranks_per_node=shape.per)
    group, wrong = Groups(mesh, measured=only(algorithm, shape, "all_to_all")).world, []
    for size in (0, 1, 7, 3 * PIECE // dtype.itemsize + 1):
        all_ = [given(rank, shape.ranks * size, dtype).view(shape.ranks, size) for rank in range(shape.ranks)]
        with counting() as traffic:
            found = group.all_to_all(all_[group.rank])
        messages = sum(rank // shape.per != group.rank // shape.per for rank in traffic.sent_to)
        if algorithm != OWN and size:
            assert messages == (shape.nodes - 1) * (1 if on_two_levels(algorithm) else shape.per)
        if not torch.equal(found, torch.stack([each[group.rank] for each in all_])):
            wrong.append(size)
    return wrong


@pytest.mark.swept("algorithm", "dtype", "shape")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("shape", "algorithm"), with_algorithms("all_to_all"), ids=str)
def test_every_all_to_all(shape: Shape, algorithm: str, dtype: torch.dtype) -> None:
    assert run_ranks(exchanged, shape.ranks, shape, algorithm, dtype) == [[]] * shape.ranks


def rounded(shape: Shape) -> tuple[float, float]:
    """Returns the relative errors of bf16 sums whose partial sums travel between nodes in fp32, and in bf16."""
    errors = []
    for options in ({}, {"partial_sums": Rounded(torch.bfloat16)}):
        group = world_of(shape, "direct+direct", **options)
        all_ = [given(rank, 1 << 16, torch.bfloat16) for rank in range(group.size)]
        right = torch.stack([each.double() for each in all_]).sum(0).chunk(group.size)[group.rank]
        out = torch.empty(len(right), dtype=torch.bfloat16)
        group.reduce_scatter(all_[group.rank], out)
        errors.append(float((out.double() - right).norm() / right.norm()))
    return errors[0], errors[1]


def test_partial_sums_in_bf16_cost_some_precision() -> None:
    """Partial sums in bf16 have 1.1 to 1.6 times the error of partial sums in fp32, which is 1.7e-3. Rounding the
    result alone costs 1.7e-3."""
    for exact, less in run_ranks(rounded, 8, Shape(2, 4)):
        assert 1.5e-3 < exact < 1.9e-3
        assert 1.1 * exact < less < 1.6 * exact


def sent(shape: Shape, algorithm: str, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Returns the bytes that this rank sends to other nodes, and to its own node, in collectives of 64 elements per
    rank."""
    group, counted = world_of(shape, algorithm), {}
    part = torch.ones(64, dtype=dtype)
    whole = part.repeat(shape.ranks)
    for kind, call in {
        "all_gather": lambda: group.all_gather(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter(whole, part),
        "all_reduce": lambda: group.all_reduce(whole),
    }.items():
        with counting() as traffic:
            call()
        away = {to: count for to, count in traffic.sent_to.items() if to // shape.per != group.rank // shape.per}
        counted[kind] = (sum(away.values()), sum(traffic.sent_to.values()) - sum(away.values()))
    return counted


@pytest.mark.parametrize(
    ("shape", "algorithm"), [*itertools.product(SHAPES, ["direct", "direct+direct", "doubling+ring"])]
)
def test_bytes_by_level(shape: Shape, algorithm: str) -> None:
    """Two levels send (p - m) s bytes out of a node of m of the p ranks, for shards of s bytes; direct exchange sends m
    (p - m) s."""
    p, m, s = shape.ranks, shape.per, 64 * 4
    ranks = run_ranks(sent, p, shape, algorithm, torch.float32)
    for kind, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        leaving = sum(counted[kind][0] for counted in ranks[:m])
        assert leaving == times * (m if algorithm == "direct" else 1) * (p - m) * s
        assert all(sum(counted[kind]) == times * (p - 1) * s for counted in ranks)


def in_two_groups(shape: Shape) -> list[str]:
    """Returns the collectives with wrong results on a hierarchy of two groups of a backend other than Gloo."""
    with another_backend():
        group = world_of(shape, OWN_LEVELS)
        n, wrong = group.size, []
        for size in (n, 1000 * n):
            all_ = [given(rank, size, torch.float32) for rank in range(n)]
            total = torch.stack([each.double() for each in all_]).sum(0)
            part, whole, sum_ = torch.empty(size // n), torch.empty(size), all_[group.rank].clone()
            with counting() as traffic:
                group.reduce_scatter(all_[group.rank], part)
                group.all_gather(whole, all_[group.rank].chunk(n)[group.rank])
                group.all_reduce(sum_)
                came = group.all_to_all(all_[group.rank])
            assert not traffic.calls["send"]
            gathered = torch.cat([each.chunk(n)[rank] for rank, each in enumerate(all_)])
            for what, found, right in (
                ("reduce_scatter", part, total.chunk(n)[group.rank]),
                ("all_gather", whole, gathered.double()),
                ("all_reduce", sum_, total),
                ("all_to_all", came, torch.cat([each.chunk(n)[group.rank] for each in all_]).double()),
            ):
                if not torch.allclose(found.double(), right, rtol=1e-5, atol=1e-5):
                    wrong.append(what)
    return wrong


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_groups_of_a_backend_with_collectives_of_its_own(shape: Shape) -> None:
    assert run_ranks(in_two_groups, shape.ranks, shape) == [[]] * shape.ranks


def measured_later(shape: Shape) -> tuple[int, int, bool]:
    """Returns the numbers of collectives that an all-reduce over all ranks takes where a run has talked before it knew
    its measurements: of a device's tensor, and of a host tensor. Returns too whether both sums are right."""
    with another_backend():
        groups, found = Groups(Mesh(dp=shape.ranks, ranks_per_node=shape.per), planned=[]), []
        assert not groups.world.any(False)
        groups.choose_by(only(OWN_LEVELS, shape, *SUMS))
        sums = [torch.ones(shape.ranks), torch.ones(shape.ranks)]
        for host, each in enumerate(sums):
            before = sum(groups.recorder.begun.values())
            with mock.patch.object(torch.accelerator, "is_available", return_value=bool(host)):
                groups.world.all_reduce(each)
            found.append(sum(groups.recorder.begun.values()) - before)
    return found[0], found[1], all(bool((each == shape.ranks).all()) for each in sums)


def test_the_group_of_all_ranks_has_levels_once_they_are_measured() -> None:
    """The levels' groups have no backend for host tensors."""
    assert run_ranks(measured_later, 4, Shape(2, 2)) == [(3, 1, True)] * 4


def uneven() -> tuple[list[str], bool]:
    """Two of ranks 0, 1 and 2 share a node. Returns the notes, and whether the all-reduce is right."""
    groups = Groups(Mesh(dp=3, pp=2, ranks_per_node=2))
    group, total = groups.along("dp"), torch.tensor([1.0 + groups.rank])
    group.all_reduce(total)
    return groups.notes, total.item() == sum(1 + rank for rank in group.ranks)


def test_unlike_nodes_are_said_once() -> None:
    for notes, right in run_ranks(uneven, 6):
        assert right
        assert len(notes) == 1
        assert "are spread unevenly over nodes" in notes[0]


def elsewhere() -> list[str]:
    return Groups(Mesh(dp=4, ranks_per_node=2), measured=only("ring", Shape(4, 2), *SUMS)).notes


def test_a_table_of_other_shapes_is_named() -> None:
    for notes in run_ranks(elsewhere, 4):
        assert notes == [
            f"{', '.join(KINDS)}: not measured on 2x2 (nodes x ranks per node): default algorithms are used"
        ]
