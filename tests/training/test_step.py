"""Decisions of a step that all ranks take alike."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from helpers.drawing import config_of
from helpers.rules import ADAMW, LION, MUON, SCHEDULE_FREE
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.optim.rule import OptimizerStep, Tile, UpdateRule
from optimus.testing import run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.training import step as module
from optimus.training.step import StepResult, training_step


def with_another_loss(config: dict[str, Any], limit: float, other: float) -> StepResult:
    """Takes a step in which `other` is added to the loss of the last rank, as a rounding difference would."""
    steps = Steps(config)
    tokens_BS = random_batch(steps.config, 1)
    terms, last = module.terms, steps.groups.rank == steps.groups.world.size - 1

    def changed(*given: Any) -> torch.Tensor:
        return terms(*given) + (other if last else 0.0)

    with mock.patch.object(module, "terms", changed):
        result = training_step(steps.model, steps.state, tokens_BS, steps.config, 1, limit)
    steps.state.finish()
    return result


@pytest.mark.swept
@pytest.mark.parametrize("tensor", [2, [2, 2]])
@pytest.mark.parametrize(("limit", "other"), [(5.0, 1.5), (5.0, 20.0), (math.inf, math.nan)])
def test_a_step_is_skipped_on_all_ranks_or_none(tensor: Any, limit: float, other: float) -> None:
    """The loss is 4.0 and the limit 5.0, except that one tensor-parallel rank has another loss."""
    config = config_of("dense", parallel={"tensor": tensor})
    results = run_ranks(with_another_loss, 2 if tensor == 2 else 4, config, limit, other)
    assert len({str(result) for result in results}) == 1
    assert results[0].skipped == (other != 1.5)


# update rules, places of the state, and divisions over ranks
DIVIDED: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw": (1, {}),
    "lion": (1, {"optimizer": {"name": "lion"}}),
    "muon": (1, {"optimizer": {"name": "muon"}, "state": {"chunk": 2000, "offload": "optimizer"}}),
    "schedule-free": (1, {"optimizer": {"name": "schedule-free"}}),
    "adamw on the host": (1, {"state": {"chunk": 2000, "offload": "all", "gradient_dtype": "bfloat16"}}),
    "schedule-free on a disk": (1, {"optimizer": {"name": "schedule-free"}, "state": {"offload": "disk"}}),
    "sharded": (2, {"state": {"chunk": 2000, "shard": "parameters"}}),
    "stages of two ranks, muon": (4, {"optimizer": {"name": "muon"}, "parallel": {"pipeline": 2, "tensor": 2}}),
}
NORMS = (1e18, 1.7e19, 1e20)


def with_gradients_of(config: dict[str, Any], norms: Sequence[float], folder: str) -> list[tuple[bool, ...]]:
    """Takes a step with gradients of each norm on one rank, and then a usual step.

    Returns for each step: whether it was skipped, was reported as huge, left all state finite, and changed any state.
    """
    if config["state"].get("offload") == "disk":
        config["state"]["disk"] = folder
    steps, found = Steps(config), []
    tokens_BS = random_batch(steps.config, 1)
    data, right = steps.groups.along("dp"), module.objective
    mine_BS = tokens_BS.split(len(tokens_BS) // data.size)[data.rank]

    def result(number: int, factor: float, limit: float = math.inf) -> StepResult:
        with mock.patch.object(module, "objective", lambda *given: right(*given) * factor):
            return training_step(steps.model, steps.state, mine_BS, steps.config, number, limit)

    for number, norm in enumerate([*norms, None], start=1):
        before = whole_state(steps.state)
        usual = result(number, 1.0, limit=-math.inf)  # is not applied
        assert usual.skipped
        assert not usual.unfit
        given = result(number, 1.0 if norm is None else norm / usual.grad_norm)
        assert norm is None or given.grad_norm == pytest.approx(norm, rel=1e-3)
        after = whole_state(steps.state)
        finite = all(bool(torch.isfinite(each).all()) for each in after.values())
        changed = any(not torch.equal(each, before[name]) for name, each in after.items())
        found.append((given.skipped, given.huge, finite, changed))
    steps.state.finish()
    return found


@pytest.mark.parametrize("case", in_turns([*DIVIDED], 4, always=3))
def test_gradients_whose_squares_do_not_fit_are_not_applied(case: str, tmp_path: Path) -> None:
    """An infinite second moment would freeze its parameter for good: every later update would be 0."""
    ranks, sections = DIVIDED[case]
    config = config_of("moe", **{**sections, "state": {"chunk": 2000} | sections.get("state", {})})
    config["lr_schedule"]["warmup_steps"] = 10  # warm-up, which does not clip
    results = run_ranks(with_gradients_of, ranks, config, NORMS, str(tmp_path))
    applied, skipped, usual = (False, True, True, True), (True, True, True, False), (False, False, True, True)
    assert results == [[applied, applied, skipped, usual]] * ranks


def test_what_is_clipped_is_applied(tmp_path: Path) -> None:
    """Clipping makes the squares finite, however large the gradient was."""
    config = config_of("dense", optimizer={"clip_norm": 1.0, "clip_during_warmup": True})
    assert with_gradients_of(config, NORMS, str(tmp_path)) == [(False, False, True, True)] * 4


@pytest.mark.parametrize("rule", [ADAMW, LION, MUON, SCHEDULE_FREE], ids=lambda rule: type(rule).__name__)
def test_the_largest_gradients_that_are_applied_leave_all_finite(rule: UpdateRule) -> None:
    """One element gets the largest gradient in the first step, and again in the second with the moments of the first."""
    weight, gradient = torch.ones(2, 2), torch.tensor([[module.LARGEST_NORM, 0.0], [0.0, 0.0]])
    kept = [torch.empty(2, 2) for _ in rule.kinds]
    rule.begin(weight, kept)
    counters = dict.fromkeys(rule.counters, 0.0)
    for number in (1, 2):
        counters = rule.count(counters, number, 1e-3)
        tile = Tile(weight[None], gradient[None], [each[None] for each in kept])
        rule.update(OptimizerStep(number, 1e-3, 1.0, counters), tile)
        assert all(torch.isfinite(each).all() for each in (weight, *kept))
