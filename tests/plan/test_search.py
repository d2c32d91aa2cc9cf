"""The search finds what trying everything finds, and says what is wrong with a question that has no answer."""

import random
from dataclasses import replace

import pytest

from optimus.config import ModelConfig
from optimus.config.load import model_config_from, resolve_model
from optimus.errors import UserError
from optimus.plan import search as module
from optimus.plan.machine import Machine, load_machine
from optimus.plan.memory import fits
from optimus.plan.search import Plan, Question, memory_in, predict, search

SPARSE = ModelConfig(
    family="olmoe", hidden=512, layers=6, heads=4, intermediate=512, vocab=1024, experts=8, experts_per_token=2
)
DENSE = ModelConfig(family="olmo", hidden=512, layers=6, heads=4, intermediate=2048, vocab=1024)


def machine(**changes: float) -> Machine:
    return load_machine("dgx-a100").model_copy(update=changes)


def question(model: ModelConfig, ranks: int = 16, batch: int = 32, **changes: float) -> Question:
    return Question(model, machine(**changes), ranks, batch, 1024)


def everything(asked: Question) -> list[Plan]:
    """Every setting that fits, the fastest first."""
    settings = [
        replace(held, recompute=recompute)
        for base in module._bases(asked)
        for held in module._sharded(asked, base.setting(asked))
        for recompute in module._recomputations(asked.model)
    ]
    fitting = [setting for setting in settings if fits(memory_in(asked, setting), asked.machine)]
    return sorted((predict(asked, setting) for setting in fitting), key=lambda plan: plan.step.seconds)


def division(plan: Plan) -> tuple[int, ...]:
    mesh = plan.setting.mesh
    return mesh.pp, mesh.tp_out, mesh.tp_in, mesh.cp, mesh.ep, mesh.etp


@pytest.mark.parametrize(
    "asked",
    [
        question(DENSE, 4, 8),
        question(DENSE, 8, 8, memory=4.2e8),  # so small that state is shared out and activations recomputed
        question(SPARSE, 4, 4, memory=8e8),
    ],
)
def test_nothing_faster_is_left_out(asked: Question) -> None:
    best: dict[tuple[int, ...], Plan] = {}
    for plan in everything(asked):
        best.setdefault(division(plan), plan)
    expected = list(best.values())[:5]
    found = search(asked, 5)
    assert [plan.step.seconds for plan in found] == pytest.approx([plan.step.seconds for plan in expected])
    assert [division(plan) for plan in found] == [division(plan) for plan in expected]


def test_a_small_memory_is_met_by_sharding_and_recomputation() -> None:
    roomy, tight = search(question(DENSE, 8, 16), 1)[0], search(question(DENSE, 8, 16, memory=4.2e8), 1)[0]
    assert roomy.setting.shard == "none" or roomy.step.seconds < tight.step.seconds
    assert tight.setting.shard != "none" or tight.setting.recompute
    assert tight.memory.total <= 4.2e8 < roomy.memory.total


def test_a_bound_is_never_above_what_is_predicted() -> None:
    for model in (DENSE, SPARSE):
        asked = question(model)
        bases = list(module._bases(asked))
        for base in random.Random(0).sample(bases, min(60, len(bases))):
            setting = base.setting(asked)
            least = module._step(asked, setting, simulated=False).seconds
            assert base.bound <= least * (1 + 1e-9)
            assert least <= predict(asked, setting).step.seconds * (1 + 1e-9), setting


def test_twelve_thousand_ranks_fill_whole_nodes() -> None:
    model = model_config_from(resolve_model("mula-220b-a10b")["model"], "")
    aurora = load_machine("aurora")
    with pytest.raises(UserError, match=r"^100 ranks do not fill nodes of 12 \(aurora\): take 96 or 108$"):
        Question(model, aurora, 100, 100, 4096)
    assert Question(model, aurora, 12288, 12288, 4096).architecture.parameters == pytest.approx(220e9, rel=0.01)


def test_a_batch_that_no_layout_divides() -> None:
    with pytest.raises(UserError, match=r"no layout divides a global batch of 3 sequences over 7 ranks: with a batch"):
        search(question(DENSE, 7, 3))


def test_a_model_that_fits_nowhere() -> None:
    with pytest.raises(
        UserError, match=r"nothing fits: a rank of dgx-a100 has 0\.0 GB, and the least that any "
    ) as error:
        search(question(DENSE, 8, 16, memory=1e6))
    assert "the smallest machine that has it is laptop" in str(error.value)
