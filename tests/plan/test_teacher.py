"""A run with a teacher as the planner sees it: its memory, its time, and the stage that holds the teacher."""

from typing import Any

import pytest
import torch

from optimus.checkpoint.store import save_model
from optimus.comm import Groups
from optimus.config import ModelConfig, load_config
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.parallel.activations import Activations
from optimus.parallel.recompute import Recomputation
from optimus.plan.job import Job
from optimus.plan.job_builder import as_configured, asked
from optimus.plan.memory import memory_of_ranks
from optimus.plan.prediction import dry_run, predict
from optimus.resolve import facts, recompute
from optimus.resolve.ranks import mesh_of
from optimus.testing.memory import tracking
from optimus.testing.steps import build
from optimus.training.step import accumulate_gradients
from optimus.training.teacher import load_teacher

VOCAB, MICRO_BATCH, CONTEXT = 4096, 4, 256


def model(hidden: int, **fields: Any) -> dict[str, Any]:
    return {
        "family": "olmo",
        "hidden": hidden,
        "layers": 2,
        "heads": 4,
        "intermediate": 3 * hidden,
        "vocab": VOCAB,
        **fields,
    }


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns paths of two models: one of another width and depth than the student, and one with experts."""
    place, paths = tmp_path_factory.mktemp("teachers"), []
    for number, fields in enumerate(({"layers": 3}, {"family": "olmoe", "experts": 4, "experts_per_token": 2})):
        made = Transformer(ModelConfig(**model(96, **fields)))
        initialize(made, number, 0.02)
        save_model(made, place / str(number), context=CONTEXT, tokenizer=None, eos_id=0)
        paths.append(str(place / str(number)))
    return paths


@pytest.fixture
def config(small_run: dict[str, Any], teachers: list[str]) -> dict[str, Any]:
    train = {"sequence_length": CONTEXT, "micro_batch": MICRO_BATCH, "global_batch": 16, "precision": "float32"}
    train = small_run["train"] | train | {"teacher": teachers}
    return small_run | {"model": model(64), "train": train}


def without(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"train": config["train"] | {"teacher": None}}


def job_of(config: dict[str, Any], ranks: int = 1, machine: str = "laptop") -> Job:
    return as_configured(asked(load_config(config), machine, ranks, []))


@pytest.mark.in_turn(2, 3)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_takes_what_a_run_holds(config: dict[str, Any], precision: str) -> None:
    """Memory at rest is exact; the peak includes the teacher's hidden states and the logits of a block of rows."""
    config["train"] |= {"precision": precision, "global_batch": MICRO_BATCH}
    tree, job = load_config(config), job_of(config)
    staged, state = build(tree, Groups(mesh_of(tree, 1)))
    state.initialize(0, 0.02)
    (memory,) = memory_of_ranks(job)
    with tracking() as allocations:
        staged.teacher = load_teacher(tree, torch.device("cpu"))
    held = allocations.current
    assert memory.parts["teacher"] == held == dry_run(job, 0)["teacher"]
    tokens_BS = torch.randint(VOCAB, (MICRO_BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the second pass allocates only what each pass allocates
        state.begin_step()
        with tracking() as allocations:
            accumulate_gradients(staged, state, tokens_BS, tree)
    assert memory.parts["activations"] + memory.parts["working"] == pytest.approx(allocations.peak, rel=0.05)
    (plain,) = memory_of_ranks(job_of(without(config)))
    assert memory.total > 1.2 * plain.total


def test_a_step_waits_for_it(config: dict[str, Any]) -> None:
    """Each microbatch waits for the teachers' forward passes and the divergence.

    A context-parallel rank runs teachers on whole sequences.
    """
    taught, alone = predict(job_of(config)).step, predict(job_of(without(config))).step
    assert taught.terms["teacher"] == pytest.approx(taught.seconds - alone.seconds)
    one = [predict(job_of(config | {"train": config["train"] | {"teacher": [path]}})).step.terms["teacher"]
           for path in config["train"]["teacher"]]  # fmt: skip
    assert max(one) < taught.terms["teacher"] < sum(one)
    divided = predict(job_of(config | {"parallel": {"context": 2}}, ranks=2, machine="dgx-a100"))
    whole = predict(job_of(config, machine="dgx-a100"))
    assert 0.5 < divided.step.terms["teacher"] / whole.step.terms["teacher"] < 1


def test_the_last_stage_has_it(config: dict[str, Any]) -> None:
    job = job_of(config | {"parallel": {"pipeline": 2, "schedule": "1f1b"}}, ranks=2)
    first, last = memory_of_ranks(job)
    assert "teacher" not in first.parts
    assert last.parts["teacher"] == memory_of_ranks(job_of(config))[0].parts["teacher"]
    assert ["teacher" in dry_run(job, rank) for rank in range(2)] == [False, True]


def test_recomputation_leaves_room_for_it(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of `recompute: auto` excludes the teacher's memory, in a run and in its plan."""
    left = list[int]()

    def choose(model: Any, budget: int, *sizes: Any) -> tuple[Recomputation, Activations]:
        left.append(budget)
        return Recomputation(), Activations(0, 0)

    monkeypatch.setattr(recompute, "choose_recomputation", choose)
    monkeypatch.setattr(facts, "free_memory", lambda device: 1 << 30)
    for each in (without(config), config):
        tree = load_config(each | {"recompute": ["auto"]})
        build(tree, Groups(mesh_of(tree, 1)))
        as_configured(asked(tree, "laptop", 1, []))
    of_run, of_plan, *taught = left
    held = memory_of_ranks(job_of(config))[0].parts["teacher"]
    assert [of_run - taught[0], of_plan - taught[1]] == [pytest.approx(0.9 * held, abs=1)] * 2
