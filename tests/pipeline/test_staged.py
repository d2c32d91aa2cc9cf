"""A model in stages on the ranks of a pipeline trains with the numbers of one process; impossible stages are refused."""

import random
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from helpers.drawing import short_run
from helpers.equality import Layout, assert_same_as_one_process
from helpers.sweep import in_turns
from optimus.config import load_config
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.pipeline.stages import Weights, divide
from optimus.resolve.microbatches import check_batches
from optimus.resolve.ranks import mesh_of
from optimus.resolve.stages import partition_of

MODELS: dict[str, dict[str, Any]] = {
    "moe": {"family": "olmoe", "intermediate": 24, "experts": 8, "experts_per_token": 2},
    "dense": {"family": "olmo", "intermediate": 48},
    "tied": {"family": "olmoe", "intermediate": 24, "experts": 8, "experts_per_token": 3, "tie_embeddings": True},
}


def config_of(model: str, layers: int = 4, **sections: dict[str, Any]) -> dict[str, Any]:
    sizes = {"hidden": 16, "layers": layers, "heads": 2, "vocab": 50}
    return short_run(sizes | MODELS[model], context=12) | sections


@pytest.mark.parametrize(
    ("model", "ranks", "overrides"),
    in_turns(
        [
            ("dense", 2, ["schedule=gpipe"]),
            ("tied", 2, []),
            ("moe", 2, ["schedule=interleaved-1f1b", "stages_per_rank=2"]),
            ("tied", 2, ["schedule=interleaved-1f1b", "stages_per_rank=2"]),
            ("moe", 4, ["warmup_factor=2", "layers_per_stage=[1,3]"]),
            ("tied", 4, ["tensor=2"]),
            ("moe", 4, ["expert=2", "context=1"]),
        ],
        2,
        always=3,
    ),
)
def test_stages_train_as_one_process(model: str, ranks: int, overrides: list[str]) -> None:
    layout = Layout(ranks, ["parallel.pipeline=2", *(f"parallel.{override}" for override in overrides)])
    assert_same_as_one_process(config_of(model), [layout], 3, rtol=2e-5)


@pytest.mark.parametrize("shard", in_turns(["optimizer", "gradients", "parameters"], 2, always=1))
def test_state_of_stages_is_shared_out(shard: str) -> None:
    layout = Layout(4, ["parallel.pipeline=2", f"state.shard={shard}", "moe.balance_scope=global"])
    assert_same_as_one_process(config_of("tied"), [layout], 3, rtol=2e-5)


def test_four_stages_with_all_the_rest() -> None:
    layout = Layout(8, ["parallel.pipeline=4", "parallel.expert=2", "state.shard=gradients", "recompute=[norm,moe]"])
    assert_same_as_one_process(config_of("moe"), [layout], 3, rtol=2e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.pipeline=8"], "makes 8 stages, but the model has 4 layers"),
        (
            ["parallel.pipeline=2", "parallel.layers_per_stage=[1,2]"],
            r"layers_per_stage \[1, 2\] must be 2 numbers .* add up to model.layers 4",
        ),
        (["parallel.schedule=gpipe"], "parallel.schedule applies to a pipeline only, but parallel.pipeline is 1"),
    ],
)
def test_bad_configurations_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(config_of("dense"), overrides)


def test_schedules_that_cannot_be_are_refused_before_launch() -> None:
    few = ["parallel.pipeline=4", "parallel.schedule=interleaved-1f1b", "train.global_batch=4"]
    with pytest.raises(UserError, match="interleaved-1f1b: 1 stage per rank"):
        check_batches(config := load_config(config_of("dense"), few), mesh_of(config, 4))
    few += ["parallel.stages_per_rank=2"]
    with pytest.raises(UserError, match="the number of microbatches, 2, is below the number of ranks, 4"):
        check_batches(config := load_config(config_of("dense", layers=8), few), mesh_of(config, 4))


def test_blocks_are_divided_so_that_the_most_expensive_stage_is_cheapest() -> None:
    assert divide(Weights([1.0] * 8), 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert divide(Weights([1.0] * 8, last=1.5), 4) == [range(2), range(2, 4), range(4, 7), range(7, 8)]
    assert divide(Weights([5.0, 1.0, 1.0, 1.0]), 2) == [range(1), range(1, 4)]
    with pytest.raises(UserError, match="2 blocks cannot be divided into 3 pipeline stages"):
        divide(Weights([1.0] * 2), 3)


def test_no_other_division_is_better() -> None:
    """The division has the best quality of all possible divisions."""
    draws = random.Random(0)
    for _ in range(300):
        blocks = draws.randint(1, 8)
        stages = draws.randint(1, blocks)
        time, memory = (
            Weights(
                [draws.choice([1.0, 1.0, 2.0, 5.5, draws.random()]) for _ in range(blocks)],
                draws.choice([0.0, 1.5]),
                draws.choice([0.0, 3.2, 20.0]),
            )
            for _ in range(2)
        )

        def quality(ends: tuple[int, ...], time: Weights = time, memory: Weights = memory) -> list[float]:
            own = [[*range(start, end)] for start, end in pairwise(ends)]
            taken, held = (
                [
                    sum(weights.blocks[block] for block in stage)
                    + weights.first * (not at)
                    + weights.last * (at == len(own) - 1)
                    for at, stage in enumerate(own)
                ]
                for weights in (time, memory)
            )
            return [max(taken), max(held), sum(each**2 for each in taken)]

        cuts = combinations(range(1, blocks), stages - 1)
        best = min([round(value, 9) for value in quality((0, *each, blocks))] for each in cuts)
        found = divide(time, stages, memory)
        assert quality((0, *(stage.stop for stage in found))) == pytest.approx(best, abs=1e-6)


def test_among_divisions_that_are_as_fast_memory_decides() -> None:
    """Nine blocks on four stages: a stage that holds more memory besides its blocks gets no third block.

    The remaining freedom evens out the times of the stages.
    """

    def sizes(time: Weights, **besides: float) -> list[int]:
        return [len(blocks) for blocks in divide(time, 4, Weights([1.0] * 9, **besides))]

    time = Weights([1.0] * 9)
    assert sorted(sizes(time)) == [2, 2, 2, 3]
    assert sizes(time, first=2.0)[0] == 1
    assert sizes(time, last=2.0)[3] == 1
    assert sizes(time, first=2.0, last=2.0)[::3] == [2, 2]
    assert sorted(sizes(Weights([1.0] * 9, last=2.0), first=50.0)) == [1, 2, 3, 3]
    assert sizes(Weights([1.0] * 9, last=2.0), last=50.0)[3] == 1


def test_a_large_vocabulary_takes_blocks_from_the_last_stage() -> None:
    config = load_config(config_of("dense", layers=8), ["parallel.pipeline=2", "model.vocab=5000"])
    partition = partition_of(config, Mesh(pp=2), 1)
    assert len(partition.blocks[0]) > len(partition.blocks[1])
    assert partition.stage_of("head.weight") == 1
    assert partition.stage_of("blocks.0.attention.qkv.weight") == 0
    assert torch.tensor([len(blocks) for blocks in partition.blocks]).sum() == 8
