"""Asynchronous checkpoints of a run on the phantom accelerator hold the state of their step, however late it is copied."""

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import optimus
from helpers.phantom import on_phantom
from helpers.sweep import in_turns
from optimus.checkpoint.folder import list_checkpoints
from optimus.checkpoint.staging import Staging
from optimus.observe.metrics import read_metrics
from optimus.state.chunk import TrainedChunk
from optimus.state.model_state import ModelState
from optimus.testing.ranks import RankError

RESIDENCES: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer": {"offload": "optimizer", "update_on": "host"},
}


def configured(small_run: dict[str, Any], residency: str) -> dict[str, Any]:
    small_run["train"] |= {"device": "phantom", "precision": "float32", "steps": 4}
    return small_run | {"checkpoint": {"every": 1, "keep": 6, "asynchronous": True}, "state": RESIDENCES[residency]}


def saved(config: dict[str, Any], device: str) -> tuple[list[float], list[list[torch.Tensor]]]:
    """Returns the losses of a run that stops and resumes once, and the weights of all its checkpoints."""
    output = Path(config["train"]["output"]).with_name(device)
    config = config | {"train": config["train"] | {"device": device, "output": str(output)}}
    optimus.train(config, ["train.stop_at=2"])
    optimus.train(config, resume=True)
    found = [list(optimus.load_model(folder).parameters()) for folder in list_checkpoints(output)]
    return [record["loss"] for record in read_metrics(output)], found


def both(config: dict[str, Any], wrong: AbstractContextManager[object] | None = None) -> None:
    torch.compiler.set_stance("force_eager")  # applies to the host's update
    with wrong or nullcontext():
        losses, weights = saved(config, "phantom")
    right, whole = saved(config, "cpu")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(right), rtol=1e-5, atol=0.0)
    assert len(weights) == len(whole) == 4
    # Weights of neighbouring steps differ by an AdamW update of about the learning rate, which is least in the first of
    # the two warm-up steps. Rounding changes a few weights with gradients near zero, by about a hundredth of an update.
    rate = config["lr_schedule"]["lr"] / config["lr_schedule"]["warmup_steps"]
    for step, (found, expected) in enumerate(zip(weights, whole), start=1):
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 0.01 * rate * b.numel() ** 0.5, f"the checkpoint of step {step} differs"


@pytest.mark.parametrize("residency", in_turns([*RESIDENCES], 4))
def test_beside_the_training(small_run: dict[str, Any], residency: str) -> None:
    on_phantom(both, 1, configured(small_run, residency))


def unheld(config: dict[str, Any]) -> None:
    """Breaks the fence: copies begin after the next update has been submitted, and updates do not wait for copies."""
    submitted: list[object] = []

    def step(self: ModelState, *how: Any) -> None:
        real_step(self, *how)
        submitted.append(None)

    def run(self: Staging) -> None:
        before = len(submitted)
        while len(submitted) == before and before not in (2, 4):  # no update follows a run's last step
            time.sleep(0.01)
        real_run(self)

    real_step, real_run = ModelState.step, Staging.run
    with ExitStack() as wrong:
        wrong.enter_context(mock.patch.object(TrainedChunk, "block_update_until"))
        wrong.enter_context(mock.patch.object(ModelState, "step", step))
        wrong.enter_context(mock.patch.object(Staging, "run", run))
        both(config, wrong)


@pytest.mark.in_turn(0, 3)
def test_planted_updates_that_do_not_wait_for_the_copy(small_run: dict[str, Any]) -> None:
    with pytest.raises(RankError, match="the checkpoint of step 1 differs"):
        on_phantom(unheld, 1, configured(small_run, "device"))
