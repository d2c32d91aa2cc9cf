"""Embedding and output layer over all ranks of a pipeline: passes in any schedule, exact numbers, and balance."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drawing import short_run
from helpers.equality import Layout, assert_same_as_one_process
from optimus.comm import Groups
from optimus.config import load_config
from optimus.errors import UserError
from optimus.pipeline import Costs, check, make_schedule, simulate
from optimus.pipeline.schedule import VOCABULARY, VOCABULARY_ALGORITHMS, Action, Kind, Schedule
from optimus.resolve.ranks import mesh_of
from optimus.testing import run_ranks
from optimus.testing.memory import allocated
from optimus.testing.steps import build

SCHEDULES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zb-h1", 1), ("zbv", 2), ("v-half", 2),
    ("v-min", 2),
]  # fmt: skip
ALGORITHMS = [*VOCABULARY_ALGORITHMS]
MODEL: dict[str, Any] = {"family": "olmo", "hidden": 16, "layers": 4, "heads": 2, "vocab": 59, "intermediate": 24}
EXPERTS: dict[str, Any] = {**MODEL, "family": "olmoe", "experts": 4, "experts_per_token": 2}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(SCHEDULES),
    ranks=st.integers(2, 5),
    microbatches=st.integers(1, 12),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_every_schedule_takes_the_passes(kind: tuple[str, int], ranks: int, microbatches: int, algorithm: int) -> None:
    """`check` accepts every schedule with its vocabulary passes, and each kind of pass runs in order of microbatches."""
    name, stages_per_rank = kind
    microbatches = max(microbatches, ranks) if name == "interleaved-1f1b" else microbatches
    schedule = make_schedule(name, ranks, microbatches, stages_per_rank, vocabulary=algorithm)
    check(schedule)
    for rank, actions in enumerate(schedule.actions):
        passes = [action for action in actions if action.kind.is_vocabulary]
        assert len(passes) == 4 * microbatches
        assert all(action.stage == rank for action in passes)
        for kind_ in VOCABULARY:
            assert [each.microbatch for each in passes if each.kind is kind_] == list(range(microbatches))


def looked_at(monkeypatch: pytest.MonkeyPatch, ranks: int) -> float:
    """Returns the calls of `input_of` per action while the passes are placed."""
    calls, input_of = 0, Schedule.input_of

    def counted(schedule: Schedule, action: Action) -> Action | None:
        nonlocal calls
        calls += 1
        return input_of(schedule, action)

    with monkeypatch.context() as patched:
        patched.setattr(Schedule, "input_of", counted)
        made = make_schedule("1f1b", ranks, 2 * ranks, vocabulary=1, transfers=False)
    return calls / sum(map(len, made.actions))


def test_each_pass_is_placed_in_the_same_time_on_few_ranks_and_on_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, 16) < 1.5 * looked_at(monkeypatch, 4)


@pytest.mark.parametrize("fault", ["without", "late"])
def test_broken_schedules_are_found(fault: str) -> None:
    from dataclasses import replace

    schedule = make_schedule("1f1b", 2, 4, vocabulary=1)
    first, second = schedule.actions
    loss = Action(Kind.LOSS, 0, 1)
    without = tuple(action for action in first if action != loss)
    broken = without if fault == "without" else (*without, loss)
    expected = "lacks loss" if fault == "without" else "before loss|deadlock"
    with pytest.raises(UserError, match=expected):
        check(replace(schedule, actions=(broken, second)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("name", "stages_per_rank"), SCHEDULES)
def test_the_output_layer_is_no_bottleneck(name: str, stages_per_rank: int, algorithm: int) -> None:
    """An output layer of half a stage's time adds an equal share to every rank, not all its time to the last one."""
    ranks, microbatches, head = 4, 32, 0.5
    unit = 1 / stages_per_rank
    shared = Costs(unit, unit, unit, logits=head / ranks)
    times = [unit] * (ranks * stages_per_rank - 1) + [unit + head]
    alone = Costs(times, times, times)
    spread = simulate(make_schedule(name, ranks, microbatches, stages_per_rank, vocabulary=algorithm), shared).makespan
    usual = simulate(make_schedule(name, ranks, microbatches, stages_per_rank), alone).makespan
    assert spread < 0.85 * usual
    assert spread > microbatches * (3 + 3 * head / ranks)  # the computations of each rank


@pytest.mark.parametrize(
    ("model", "ranks", "overrides"),
    [
        (MODEL, 2, ["schedule=gpipe"]),
        (EXPERTS | {"tie_embeddings": True}, 2, ["schedule=interleaved-1f1b", "stages_per_rank=2"]),
        (EXPERTS, 4, ["schedule=zbv", "stages_per_rank=2", "tensor=2"]),
        (MODEL | {"tie_embeddings": True}, 4, ["schedule=zb-h1", "tensor=[1,2]", "context=1"]),
        (EXPERTS, 4, ["pipeline=4", "warmup_factor=2"]),
        (EXPERTS, 4, ["expert=2", "context=2"]),
        (GEMMA, 2, ["schedule=v-half", "stages_per_rank=2", "vocabulary_algorithm=2"]),
        (
            EXPERTS | {"tie_embeddings": True},
            4,
            ["schedule=v-min", "stages_per_rank=2", "tensor=2", "vocabulary_algorithm=2"],
        ),
        (MODEL, 4, ["tensor=[1,2]", "vocabulary_algorithm=2"]),
        (EXPERTS, 4, ["tensor=2", "sequence=false", "schedule=zb-h1", "vocabulary_algorithm=2"]),
        (EXPERTS, 4, ["pipeline=4", "warmup_factor=2", "vocabulary_algorithm=2"]),
        (EXPERTS, 4, ["expert=2", "context=2", "schedule=v-half", "stages_per_rank=2", "vocabulary_algorithm=2"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("shard", ["none", "parameters"])
@pytest.mark.swept("shard")
def test_numbers_are_those_of_one_process(model: dict[str, Any], ranks: int, overrides: list[str], shard: str) -> None:
    keys = ["parallel.pipeline=2", "parallel.vocabulary=true", *(f"parallel.{each}" for each in overrides)]
    layout = Layout(
        ranks, [*keys, f"state.shard={shard}", "moe.balance_scope=global"][: None if "experts" in model else -1]
    )
    assert_same_as_one_process(short_run(model, context=12), [layout], 3, rtol=2e-5)


def parameter_bytes(config: dict[str, Any], ranks: int) -> int:
    tree = load_config(config)
    _, state = build(tree, Groups(mesh_of(tree, ranks)))
    return allocated(state.chunks)["parameters"]


def test_stages_hold_as_much() -> None:
    """Parameter bytes of the ranks differ by less than 5 % for a vocabulary larger than the blocks.

    Without vocabulary parallelism they differ by more than a factor of 5.
    """
    config = short_run(MODEL | {"vocab": 4096}, context=12)
    spread = run_ranks(parameter_bytes, 4, config | {"parallel": {"pipeline": 4, "vocabulary": True}}, 4)
    usual = run_ranks(parameter_bytes, 4, config | {"parallel": {"pipeline": 4}}, 4)
    assert max(spread) < 1.05 * min(spread)
    assert max(usual) > 5 * min(usual)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.vocabulary=true"], "parallel.vocabulary applies to a pipeline only, but parallel.pipeline is 1"),
        (
            ["parallel.pipeline=2", "parallel.vocabulary=true", "parallel.executor=message-driven"],
            "parallel.vocabulary applies to executor: scheduled only, .* remove one of them",
        ),
        (
            ["parallel.pipeline=2", "parallel.vocabulary=true", "parallel.tensor=2", "model.vocab=3"],
            r"model.vocab 3 is less than parallel.tensor x pipeline 4: every rank needs a token",
        ),
        (
            ["parallel.pipeline=2", "parallel.vocabulary_algorithm=2"],
            "parallel.vocabulary_algorithm needs parallel.vocabulary: true: set vocabulary, or remove",
        ),
        (
            ["parallel.vocabulary_algorithm=2"],
            "parallel.vocabulary_algorithm applies to a pipeline only, but parallel.pipeline is 1",
        ),
    ],
)
def test_bad_configurations_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(short_run(MODEL, context=12), overrides)
