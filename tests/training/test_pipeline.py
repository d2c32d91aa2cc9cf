"""The pipeline of a run, from its configuration: microbatches, stages, and refusals before the launch."""

from typing import Any

import pytest

from optimus.config import RunConfig, load_config
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.pipeline.checking import check
from optimus.pipeline.message_driven_simulation import simulate_message_driven
from optimus.pipeline.simulation import simulate
from optimus.pipeline.staged import StagePartition
from optimus.resolve.microbatches import check_batches, with_microbatches
from optimus.resolve.ranks import mesh_of
from optimus.resolve.stages import partition_of, placement_of, schedule_of, tied_embeddings

V = ["parallel.schedule=zbv", "parallel.stages_per_rank=2"]
INTERLEAVED = ["parallel.schedule=interleaved-1f1b", "parallel.stages_per_rank=2"]
MESSAGE_DRIVEN = ["parallel.executor=message-driven"]


def config_of(*overrides: str, layers: int = 8, pipeline: int = 4) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"family": "olmo", "hidden": 16, "layers": layers, "heads": 2, "vocab": 64, "intermediate": 48},
        "data": {"path": ""},
        "train": {
            "output": "",
            "steps": 10,
            "global_batch": 96,
            "micro_batch": 96,
            "sequence_length": 12,
            "precision": "bfloat16",
        },
        "parallel": {"pipeline": pipeline},
    }
    return load_config(tree, overrides)


# ---- Microbatches ----


def bubble(config: RunConfig, microbatches: int) -> float:
    """Returns the bubble of the simulation; infinite for an impossible schedule."""
    if config.parallel.executor == "message-driven":
        parallel = config.parallel
        return simulate_message_driven(
            parallel.pipeline, microbatches, caps=parallel.max_in_flight, stages_per_rank=parallel.stages_per_rank
        ).bubble
    try:
        return simulate(schedule_of(config, microbatches)).bubble
    except UserError:
        return float("inf")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 32),  # 3/m
        (["parallel.schedule=gpipe"], 32),
        (INTERLEAVED, 16),  # 3/2m
        (["parallel.schedule=zb-h1"], 12),  # 3/3m
        (V, 6),  # 3/6m
    ],
)
def test_auto_takes_the_fewest_that_keep_ranks_busy(overrides: list[str], expected: int) -> None:
    config = config_of("parallel.microbatches=auto", *overrides)
    found = with_microbatches(config, 4)
    assert 96 // found.train.micro_batch == expected
    assert found.parallel.microbatches is None
    assert bubble(config, expected) <= 0.1
    assert all(bubble(config, n) > 0.1 for n in range(1, expected) if 96 % n == 0)


@pytest.mark.parametrize("caps", ["null", "3", "[8,6,4,2]"])
def test_auto_for_a_message_driven_pipeline(caps: str) -> None:
    config = config_of("parallel.microbatches=auto", *MESSAGE_DRIVEN, f"parallel.max_in_flight={caps}")
    found = 96 // with_microbatches(config, 4).train.micro_batch
    able = [n for n in range(1, 97) if 96 % n == 0]
    busy = [n for n in able if bubble(config, n) <= 0.1]
    assert found == (busy[0] if busy else min(able, key=lambda n: bubble(config, n)))


def test_auto_takes_the_best_there_is_where_none_is_enough() -> None:
    config = config_of("parallel.microbatches=auto", "train.global_batch=8", "train.micro_batch=8")
    assert with_microbatches(config, 4).train.micro_batch == 1
    assert with_microbatches(config, 8).train.micro_batch == 1  # four sequences for each data-parallel rank


def test_auto_with_interleaving_fills_the_ranks() -> None:
    config = config_of("parallel.microbatches=auto", *INTERLEAVED, "train.global_batch=4", "train.micro_batch=4")
    found = with_microbatches(config, 4)
    assert found.train.micro_batch == 1  # interleaving needs four
    check_batches(found, mesh_of(found, 4))


def test_train_micro_batch_is_the_limit_of_auto() -> None:
    config = config_of("parallel.microbatches=auto", *V, "train.micro_batch=4")
    assert with_microbatches(config, 4).train.micro_batch == 4


@pytest.mark.parametrize(("ranks", "micro_batch"), [(4, 12), (8, 6)])
def test_a_number_of_microbatches(ranks: int, micro_batch: int) -> None:
    config = config_of("parallel.microbatches=8")
    assert with_microbatches(config, ranks).train.micro_batch == micro_batch
    assert config.train.micro_batch == 96  # the given configuration is unchanged


def test_without_a_number_nothing_is_changed() -> None:
    config = config_of()
    assert with_microbatches(config, 4) is config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (),
            r"microbatches 7: the 96 sequences of a step .* into 1, 2, 3, 4, 6, 8, .* choose one of these numbers, or auto",
        ),
        (
            ("train.micro_batch=12",),
            r"microbatches 7: .* into 8, 12, 16, 24, 32, 48, 96 microbatches of at most train.micro_batch 12",
        ),
    ],
)
def test_a_number_that_does_not_divide_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_microbatches(config_of("parallel.microbatches=7", *overrides), 4)


# ---- Places of the stages ----


def test_stages_go_there_and_back_for_zbv() -> None:
    config = config_of(*V)
    partitions = [partition_of(config, Mesh(pp=4), rank) for rank in range(4)]
    assert [list(partition.local_stages) for partition in partitions] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    first = partitions[0]
    assert first.has_first
    assert first.has_last
    assert [len(blocks) for blocks in first.blocks] == [1] * 8


def test_stages_go_round_for_others() -> None:
    for overrides in (INTERLEAVED, [*MESSAGE_DRIVEN, "parallel.stages_per_rank=2"]):
        partitions = [partition_of(config_of(*overrides), Mesh(pp=4, dp=2), rank) for rank in range(0, 8, 2)]
        assert [list(partition.local_stages) for partition in partitions] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_ranks_of_a_stage_have_the_same_blocks() -> None:
    config = config_of("parallel.layers_per_stage=[1,3,2,2]")
    mesh = Mesh(pp=4, dp=2)
    partitions = [partition_of(config, mesh, rank) for rank in range(8)]
    assert all(list(partition.blocks) == [range(1), range(1, 4), range(4, 6), range(6, 8)] for partition in partitions)
    assert [partition.local_stages[0] for partition in partitions] == [mesh.coordinate(rank, "pp") for rank in range(8)]


def test_without_a_pipeline_there_is_one_stage() -> None:
    """The passes of the only stage take turns, so that one microbatch's activations are alive."""
    config = config_of(pipeline=1)
    assert partition_of(config, Mesh(dp=2), 0) == StagePartition([range(8)], [0])
    schedule = schedule_of(config, 5)
    check(schedule)
    assert simulate(schedule).peak_activations == [1]
    assert all(action.kind.computes for action in schedule.actions[0])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (INTERLEAVED, True),
        (V, False),  # one rank has the embedding and the output layer
        (MESSAGE_DRIVEN, True),
        (["parallel.vocabulary=true"], False),  # each rank has a part of the vocabulary
    ],
)
def test_ends_that_share_an_embedding(overrides: list[str], expected: bool) -> None:
    assert tied_embeddings(config_of(*overrides, "model.tie_embeddings=true")) == expected
    assert not tied_embeddings(config_of(*overrides))


def test_the_schedule_has_the_stages_of_the_placement() -> None:
    for overrides in ([], INTERLEAVED, V, MESSAGE_DRIVEN):
        config = config_of(*overrides)
        place, schedule = placement_of(config), schedule_of(config, 4)
        stages = range(place.stages)
        assert [place.rank_of(stage) for stage in stages] == [schedule.rank_of(stage) for stage in stages]


# ---- Refused configurations ----


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*MESSAGE_DRIVEN, "parallel.max_in_flight=0"], r"parallel.max_in_flight"),
        (
            [*MESSAGE_DRIVEN, "parallel.max_in_flight=[1,1,0,1]"],
            r"max_in_flight \[1, 1, 0, 1\] must be .* 4 numbers above 0, one per",
        ),
        (
            [*MESSAGE_DRIVEN, "parallel.max_in_flight=[1,1]"],
            r"max_in_flight \[1, 1\] must be a number, or a list of 4 numbers above 0",
        ),
        (
            ["parallel.max_in_flight=4"],
            "max_in_flight needs executor: message-driven: set executor, or remove max_in_flight",
        ),
        (
            [*MESSAGE_DRIVEN, "parallel.schedule=gpipe"],
            r"parallel.schedule applies to executor: .*: remove it \(max_in_flight limits the live activations\)",
        ),
        (
            [*MESSAGE_DRIVEN, "parallel.warmup_factor=2"],
            "parallel.warmup_factor applies to executor: scheduled only, .*: remove it",
        ),
        (
            [*MESSAGE_DRIVEN, "parallel.vocabulary=true"],
            "parallel.vocabulary applies to executor: scheduled only, .*: remove one of them",
        ),
        (["parallel.warmup_factor=0.5"], "parallel.warmup_factor"),
        (["model.layers=3"], "makes 4 stages, but the model has 3 layers: use at most one stage per layer"),
        ([*V, "model.layers=7"], "x stages_per_rank 2 makes 8 stages, but the model has 7 layers"),
        (
            ["parallel.vocabulary=true", "model.vocab=3"],
            "vocab 3 is less than parallel.tensor x pipeline 4: every rank",
        ),
    ],
)
def test_configurations_that_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(*overrides)


@pytest.mark.parametrize(
    "name", ["schedule=gpipe", "executor=message-driven", "max_in_flight=2", "microbatches=auto", "warmup_factor=2"]
)
def test_what_is_about_pipelines_needs_one(name: str) -> None:
    with pytest.raises(
        UserError, match=f"parallel.{name.split('=')[0]} applies to a pipeline only, .* is 1: remove it"
    ):
        config_of(f"parallel.{name}", pipeline=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*INTERLEAVED, "train.micro_batch=48"],
            "the number of microbatches, 2, is below the number of ranks, 4; use at least 4 smaller microbatches, "
            "fewer ranks, or schedule 1f1b",
        ),
        (
            ["parallel.schedule=interleaved-1f1b"],
            "1 stage per rank leaves nothing to interleave; use 2, or schedule 1f1b",
        ),
        (["parallel.schedule=zbv"], "zbv: the number of stages per rank cannot be 1; use 2"),
        (
            ["parallel.schedule=zb-h1", "parallel.stages_per_rank=2"],
            "zb-h1: the number of stages per rank cannot be 2; use 1",
        ),
        (
            ["parallel.schedule=gpipe", "parallel.warmup_factor=2"],
            "a warm-up factor other than 1 is an option of 1f1b only; leave it out",
        ),
    ],
)
def test_schedules_that_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_batches(config := config_of(*overrides), mesh_of(config, 4))
