"""What all ranks decide alike in a step."""

import math
from typing import Any
from unittest import mock

import pytest
import torch

from helpers.drawing import config_of
from optimus.testing import run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.train import step as module
from optimus.train.step import StepResult, training_step


def with_another_loss(config: dict[str, Any], limit: float, other: float) -> StepResult:
    """A step in which `other` is added to the loss of the last rank, as if it had computed otherwise."""
    steps = Steps(config)
    tokens_BS = random_batch(steps.config, 1)
    terms, last = module.terms, steps.groups.rank == steps.groups.world.size - 1

    def changed(*given: Any) -> torch.Tensor:
        return terms(*given) + (other if last else 0.0)

    with mock.patch.object(module, "terms", changed):
        result = training_step(steps.model, steps.state, tokens_BS, steps.config, 1, limit)
    steps.state.finish()
    return result


@pytest.mark.parametrize("tensor", [2, [2, 2]])
@pytest.mark.parametrize(("limit", "other"), [(5.0, 1.5), (5.0, 20.0), (math.inf, math.nan)])
def test_a_step_is_skipped_on_all_ranks_or_none(tensor: Any, limit: float, other: float) -> None:
    """The loss is 4.0 and the limit 5.0, but on one rank of the tensor-parallel ones it is another."""
    config = config_of("dense", parallel={"tensor": tensor})
    results = run_ranks(with_another_loss, 2 if tensor == 2 else 4, config, limit, other)
    assert len({str(result) for result in results}) == 1
    assert results[0].skipped == (other != 1.5)
