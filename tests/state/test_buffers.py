"""The buffers of a sharded chunk, and the refusal of every transition that the table does not have."""

import itertools

import pytest
import torch

from helpers.rules import ADAMW, plan_chunks, state_spec
from optimus.config.tree import ShardRanks, StateConfig, shard_widths
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.optim.rule import OptimizerStep, Tile, UpdateRule
from optimus.state.buffers import ShardDepths, aligned, buffers
from optimus.state.plan import ChunkRow, ParameterSlot, ShardStep, lay_out, sharing_steps

BF16, FP32 = torch.bfloat16, torch.float32


class Plain(UpdateRule):
    """An update rule without buffers."""

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        tile.weight.sub_(tile.gradient, alpha=now.lr)


@pytest.mark.parametrize(
    ("shard", "ranks", "steps", "depths"),
    [
        ("none", None, [], (0, 0, 0)),
        ("optimizer", None, [24], (0, 0, 1)),
        ("gradients", 6, [6], (0, 1, 1)),
        ("parameters", None, [24], (1, 1, 1)),
        ("parameters", ShardRanks(parameters=2, gradients=12), [2, 6, 2], (1, 2, 3)),
        ("parameters", ShardRanks(parameters=4, gradients=4, optimizer=12), [4, 3], (1, 1, 2)),
        ("parameters", ShardRanks(parameters=1, gradients=24), [24], (0, 1, 1)),
        ("gradients", ShardRanks(gradients=48), [24], (0, 1, 1)),
    ],
)
def test_steps(shard: str, ranks: int | ShardRanks | None, steps: list[int], depths: tuple[int, ...]) -> None:
    there = min(ranks, 24) if isinstance(ranks, int) else 24
    assert sharing_steps(shard_widths(shard, ranks), there) == (steps, depths)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (ShardRanks(parameters=2, gradients=3), "gradients over 3 ranks .* a multiple of 2"),
        (ShardRanks(gradients=4), "gradients over 4 ranks .* a multiple of 8"),
        (ShardRanks(parameters=3), "parameters over 3 ranks .* a divisor of 8"),
    ],
)
def test_widths_that_do_not_nest(ranks: ShardRanks, message: str) -> None:
    with pytest.raises(UserError, match=rf"^state.shard_ranks: {message}"):
        sharing_steps(shard_widths("parameters", ranks), 8)


def test_parts_lie_within_parts() -> None:
    options = StateConfig.model_validate({"shard": "parameters", "shard_ranks": {"parameters": 2, "gradients": 4}})
    whole = range(8 * 32)
    found = []
    for rank in range(8):
        (plan,) = plan_chunks({"x": Layout((250,))}, Mesh(dp=8), rank, options, state_spec(BF16))
        assert plan.shard_steps == (ShardStep(2, rank % 2), ShardStep(2, rank // 2 % 2), ShardStep(2, rank // 4))
        extents = [plan.extent(depth) for depth in range(4)]
        assert [len(whole[extent]) for extent in extents] == [256, 128, 64, 32]
        for depth, part in itertools.combinations(range(4), 2):
            assert whole[extents[depth]][plan.within(depth, part)] == whole[extents[part]]
        found += whole[plan.shard]
    assert sorted(found) == list(whole)


def test_what_a_chunk_has() -> None:
    kinds = [(each.kind, each.depth, each.lifetime) for each in buffers(ShardDepths(1, 2, 3), BF16, FP32, ADAMW)]
    assert kinds == [
        ("parameters", 0, "use"),
        ("parameters.shard", 1, "always"),
        ("gradients", 0, "use"),
        ("gradients.shard", 2, "always"),
        ("master", 3, "always"),
        ("adamw.m", 3, "always"),
        ("adamw.v", 3, "always"),
    ]
    kinds = [
        (each.kind, each.lifetime)
        for each in buffers(ShardDepths(0, 0, 0), FP32, FP32, Plain(weight_decay=0.0), lifetime="step")
    ]
    assert kinds == [("parameters", "always"), ("gradients", "always")]
    assert buffers(ShardDepths(1, 1, 1), FP32, FP32, Plain(weight_decay=0.0), lifetime="step")[0].lifetime == "step"


@pytest.mark.parametrize("align", [32, 128])
def test_formats_may_need_multiples(align: int) -> None:
    """Parameters and shards begin at multiples of `align`, as formats with a scale for each block need."""
    ((_, *first), (_, *second)) = lay_out([100, 130], 1 << 20, align)[0]
    assert (first, second) == ([0, 100], [128, 258])
    places = (("a", 100, 0, 100), ("b", 130, 128, 258))
    slots = tuple(ParameterSlot(name, Layout((size,)), (slice(0, size),), *place) for name, size, *place in places)
    (borders,) = ChunkRow((), (), ADAMW, [slots], align, small=False).borders(3)
    assert borders == (range(0, 3 * 128 + 1, 128) if align == 128 else range(0, 3 * 96 + 1, 96))
    assert aligned(129, align) == (160 if align == 32 else 256)
