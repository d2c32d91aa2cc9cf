"""The layout of parameters in chunks, and of chunks over ranks."""

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.rules import plan_chunks, state_spec
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.mesh.mesh import runs_of_tensor
from optimus.state.plan import (
    ChunkPlan,
    ChunkSizes,
    ParameterSlot,
    ShardStep,
    check_shard_ranks,
    chunk_limit,
    lay_out,
    search_limit,
    shard_groups,
    shard_partitions,
    wasted,
)

BF16 = torch.bfloat16


def plans_of(*sizes: int, limit: int | None) -> list[ChunkPlan]:
    return plan_chunks(
        {f"p{i}": Layout((size,)) for i, size in enumerate(sizes)}, Mesh(), 0, StateConfig(chunk=limit), state_spec()
    )


def test_order_alignment_and_limit() -> None:
    chunks = [plan.slots for plan in plans_of(10, 32, 33, 100, 1, limit=128)]
    assert [[slot.name for slot in chunk] for chunk in chunks] == [["p0", "p1", "p2"], ["p3"], ["p4"]]
    assert [(slot.start, slot.end) for slot in chunks[0]] == [(0, 10), (32, 64), (64, 97)]
    for chunk in chunks:
        assert chunk[0].start == 0
        assert all(slot.start % 32 == 0 and slot.end - slot.start == slot.shape.numel() for slot in chunk)
        assert chunk[-1].end <= 128


def test_a_parameter_larger_than_the_limit_has_its_own_chunk() -> None:
    plans = plans_of(500, 10, 500, 10, 10, limit=128)
    assert [[slot.name for slot in plan.slots] for plan in plans] == [["p0"], ["p1"], ["p2"], ["p3", "p4"]]
    assert plans[0].slots == (ParameterSlot("p0", Layout((500,)), (slice(0, 500),), 0, 500),)


def test_exactly_the_limit_still_fits() -> None:
    assert len(plans_of(32, 32, limit=64)) == 1
    assert len(plans_of(32, 33, limit=64)) == 2


def test_the_search_wastes_least() -> None:
    """The search wastes as little as the best of all sizes, for groups whose best size is inside the range."""
    groups = [[300] * 7, [700, 500, 600], [50]]
    sizes = range(4096, 1023, -32)

    def waste(limit: int) -> int:
        return sum(limit - chunk[-1][2] for group in groups[:2] for chunk in lay_out(group, limit))

    best = min(sizes, key=waste)
    assert 1024 < best < 4096
    assert waste(search_limit(groups, 1024, 4096)) == waste(best)


@given(
    groups=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=12), min_size=1, max_size=3),
    smallest=st.integers(32, 2000),
)
def test_the_search_stays_in_its_range(groups: list[list[int]], smallest: int) -> None:
    assert smallest <= search_limit(groups, smallest, 4 * smallest) <= 4 * smallest


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12), limits=st.lists(st.integers(32, 20000), min_size=1)
)
def test_what_is_wasted_is_what_chunks_leave_empty(sizes: list[int], limits: list[int]) -> None:
    left = [sum(max(0, limit - chunk[-1][2]) for chunk in lay_out(sizes, limit)) for limit in limits]
    assert wasted(sizes, np.array(limits)).tolist() == left


@settings(deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=8), min_size=1, max_size=3),
    smallest=st.integers(32, 800),
    more=st.integers(0, 600),
)
def test_a_range_of_the_user_is_searched_as_in_the_paper(groups: list[list[int]], smallest: int, more: int) -> None:
    """Elixir, section 4: all sizes of the range are tested, and the one that wastes least is taken."""
    largest = smallest + more

    def waste(limit: int) -> int:
        chunks = [chunk for group in groups if length(group) > smallest for chunk in lay_out(group, limit)]
        return sum(max(0, limit - chunk[-1][2]) for chunk in chunks)

    def length(group: list[int]) -> int:
        return sum(-(-size // 32) * 32 for size in group[:-1]) + group[-1]

    found = chunk_limit(groups, ChunkSizes(None, (smallest, largest)))
    assert smallest <= found <= largest
    assert waste(found) == min(waste(limit) for limit in range(smallest, largest + 1))


@pytest.mark.parametrize("offload", ["none", "all", "disk"])
def test_a_small_group_is_neither_sharded_nor_moved(offload: str) -> None:
    """The groups with fewer elements than the limit are one chunk each, whole on the device on every rank."""
    sizes = {"norm": 64, "router": 128, "wide": 4096, "expert": 96, "large expert": 4096}
    layouts = {
        name: Layout((size,), ((0, "ep"),), ("edp",)) if "expert" in name else Layout((size,))
        for name, size in sizes.items()
    }
    config = StateConfig(shard="parameters", chunk=4096, offload=offload, unsharded_below=2150)  # type: ignore[arg-type]
    plans = {plan.slots[0].name: plan for plan in plan_chunks(layouts, MESH, 3, config, state_spec())}
    assert [slot.name for slot in plans["expert"].slots] == ["expert", "large expert"]  # 48 and 2,048 elements: 2,112
    for name, plan in plans.items():
        small = name == "expert"
        assert plan.small == small
        assert bool(plan.shard_steps) != small
        assert plan.replica_count == (4 if small else 1)
        assert plan.updated == (plan.size if small else plan.size // 8)
        assert plan.keeps_unsharded == small
        assert (plan.offloaded, plan.lifetime == "always") == (not small and offload != "none", small)


def test_groups_that_fit_into_the_smallest_chunk_are_one_chunk_each() -> None:
    # Groups of one chunk do not count, so the limit is the largest
    assert search_limit([[10, 10], [20]], 128, 4096) == 4096


MESH = Mesh(dp=8, ep=2)  # edp = 4


@pytest.mark.parametrize(
    ("options", "dense", "experts"),
    [
        ({"shard": "none"}, [[r] for r in range(8)], [[0], [2], [4], [6]]),
        ({"shard": "optimizer"}, [[*range(8)]], [[0, 2, 4, 6]]),
        ({"shard": "optimizer", "shard_over": "data"}, [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 2, 4, 6]]),
        ({"shard": "parameters", "shard_ranks": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [4, 6]]),
        (
            {"shard": "gradients", "shard_over": "data", "shard_ranks": 2},
            [[0, 2], [4, 6], [1, 3], [5, 7]],
            [[0, 2], [4, 6]],
        ),
        ({"shard": "optimizer", "shard_ranks": 8}, [[*range(8)]], [[0, 2, 4, 6]]),
    ],
)
def test_who_shares_state_with_whom(
    options: dict[str, object], dense: list[list[int]], experts: list[list[int]]
) -> None:
    config = StateConfig.model_validate(options)
    assert shard_groups(MESH, MESH.group(0, ("dp", "cp")), config) == dense
    assert shard_groups(MESH, MESH.group(0, ("edp",)), config) == experts


@pytest.mark.parametrize("replicas", [("dp", "cp"), ("edp",)])
@pytest.mark.parametrize("over", ["replicas", "data"])
@pytest.mark.parametrize("ranks", [None, 1, 2, 4])
def test_shards_and_copies_divide_all_ranks(replicas: tuple[str, ...], over: str, ranks: int | None) -> None:
    config = StateConfig.model_validate({"shard": "optimizer", "shard_over": over, "shard_ranks": ranks})
    *sharing, copies = shard_partitions(MESH, replicas, config)
    shards = sharing[0] if sharing else [[rank] for rank in range(8)]
    assert len(sharing) == (ranks != 1)
    for parts in (shards, copies):
        assert sorted(rank for part in parts for rank in part) == list(range(8))
        assert all(part == sorted(part) for part in parts)
    for rank in range(8):
        shard, copy = (next(part for part in parts if rank in part) for parts in (shards, copies))
        assert set(shard) & set(copy) == {rank}
        assert len(shard) * len(copy) == len(MESH.group(rank, replicas))


def test_shard_ranks_that_do_not_divide() -> None:
    with pytest.raises(UserError, match=r"state.shard_ranks 3 does not divide the 8 replicas .* 1, 2, 4, 8"):
        shard_groups(MESH, range(8), StateConfig(shard="optimizer", shard_ranks=3))


def test_shard_ranks_of_parameters_that_tensor_ranks_also_sum() -> None:
    layouts = {"norm": Layout((8,), partial_axes=("dp", "cp", "tp_out"))}
    check_shard_ranks(layouts, Mesh(dp=2, tp=2), StateConfig(shard="optimizer", shard_ranks=2))
    with pytest.raises(UserError, match="at most 2 replicas"):
        check_shard_ranks(layouts, Mesh(dp=2, tp=2), StateConfig(shard="optimizer", shard_ranks=4))


def test_shard_ranks_of_layers_whose_tensor_ranks_share_sequences() -> None:
    """Four groups of ranks have the same parameters in a layer with two of eight tensor-parallel ranks."""
    runs, in_run = runs_of_tensor(2)
    layouts = {"up": Layout((8, 8), ((0, in_run),), partial_axes=("dp", "cp", runs))}
    check_shard_ranks(layouts, Mesh(dp=2, tp=8), StateConfig(shard="optimizer", shard_ranks=8))
    with pytest.raises(UserError, match="at most 8 replicas"):
        check_shard_ranks(layouts, Mesh(dp=2, tp=8), StateConfig(shard="optimizer", shard_ranks=16))


@pytest.mark.parametrize(
    ("mesh", "options", "most"),
    [
        (Mesh(dp=4, cp=2, ep=4), {}, 8),
        (Mesh(dp=8, ep=2), {"shard_over": "data"}, 4),
        (Mesh(dp=2, tp=2), {}, 4),  # experts, which the grid does not split
        (Mesh(pp=2, dp=2, ep=2), {}, 2),
        (Mesh(), {}, 1),
    ],
)
def test_more_shard_ranks_than_replicas_are_refused(mesh: Mesh, options: dict[str, str], most: int) -> None:
    """A number of shard ranks above the replicas is refused; earlier versions silently took all replicas."""
    layouts = {"dense": Layout((8, 8)), "experts": Layout((8, 8), ((0, "ep"),), partial_axes=("edp",))}
    for wanted in (None, 1, most):
        check_shard_ranks(layouts, mesh, StateConfig(shard="optimizer", shard_ranks=wanted, **options))
    with pytest.raises(
        UserError, match=rf"shard_ranks {2 * most}: a parameter has at most {most} replicas .* set it to"
    ):
        check_shard_ranks(layouts, mesh, StateConfig(shard="optimizer", shard_ranks=2 * most, **options))


LAYOUTS = {
    "a": Layout((64, 10)),
    "experts": Layout((4, 32, 8), ((0, "ep"),), ("edp",)),
    "b": Layout((128,)),
}


def test_experts_have_chunks_of_their_own_where_their_replicas_differ() -> None:
    plans = plan_chunks(LAYOUTS, MESH, 3, StateConfig(shard="optimizer"), state_spec())
    assert [[slot.name for slot in plan.slots] for plan in plans] == [["a", "b"], ["experts"]]
    dense, experts = plans
    assert (dense.shard_steps, dense.replica_count) == ((ShardStep(8, 3),), 1)
    assert (experts.shard_steps, experts.replica_count) == ((ShardStep(4, 1),), 1)
    assert experts.slots[0].region == (slice(2, 4), slice(0, 32), slice(0, 8))
    # All ranks hold all parameters
    (together,) = plan_chunks(LAYOUTS, Mesh(dp=8), 3, StateConfig(shard="optimizer"), state_spec())
    assert [slot.name for slot in together.slots] == ["a", "experts", "b"]


@pytest.mark.parametrize(
    ("shard", "formula"),
    [
        ("none", lambda p, n: 16 * p),
        ("optimizer", lambda p, n: 4 * p + 12 * p / n),
        ("gradients", lambda p, n: 2 * p + 14 * p / n),
        ("parameters", lambda p, n: 16 * p / n),
    ],
)
def test_bytes_follow_the_formulas(shard: str, formula: object) -> None:
    """Bytes are those of ZeRO, section 5, with bf16 gradients, summed over both kinds of parameters (TED, equation
    7.4)."""
    options = StateConfig.model_validate({"shard": shard, "gradient_dtype": "bfloat16"})
    dense, experts = plan_chunks(LAYOUTS, MESH, 0, options, state_spec(BF16))
    assert sum(dense.bytes_by_kind().values()) == formula(768, 8)  # type: ignore[operator]
    assert sum(experts.bytes_by_kind().values()) == formula(512, 4)  # type: ignore[operator]


def test_global_positions() -> None:
    layout = Layout((4, 6, 5), ((1, "ep"),), ("edp",))
    mesh = Mesh(dp=4, ep=2)
    whole = torch.arange(prod(layout.shape)).view(layout.shape)
    for rank in range(4):
        (plan,) = plan_chunks({"x": layout}, mesh, rank, StateConfig(), state_spec())
        slot = plan.slots[0]
        part = whole[slot.region].flatten()
        assert torch.equal(slot.global_positions(torch.arange(len(part))), part)


@pytest.mark.parametrize("options", [{}, {"shard": "optimizer", "chunk": 300}, {"shard": "parameters", "chunk": 120}])
def test_chunks_lie_alike_whatever_part_a_rank_has(options: dict[str, Any]) -> None:
    """Ranks with smaller parts of one parameter have the same chunks, so that ranks can share the other parameters."""
    layouts = {
        "embedding": Layout((7, 33), ((0, "tp_out"),), uneven=(0,)),
        "experts": Layout((2, 40), partial_axes=("edp",)),
        "norm": Layout((33,), partial_axes=("dp", "cp", "tp_out")),
        "head": Layout((7, 33), ((0, "tp_out"),), uneven=(0,)),
    }
    mesh = Mesh(dp=2, tp=3)
    plans = [
        plan_chunks(layouts, mesh, rank, StateConfig.model_validate(options), state_spec()) for rank in range(mesh.size)
    ]

    def lie(plan: ChunkPlan) -> list[Any]:
        return [
            plan.length,
            plan.shard_count,
            plan.replica_count,
            *((slot.name, slot.start, slot.limit) for slot in plan.slots),
        ]

    assert all([lie(plan) for plan in each] == [lie(plan) for plan in plans[0]] for each in plans)
    ends = {slot.end - slot.start for each in plans for plan in each for slot in plan.slots if slot.name == "embedding"}
    assert ends == {3 * 33, 2 * 33}
