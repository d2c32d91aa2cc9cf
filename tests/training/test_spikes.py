"""A step whose loss is far above that of earlier steps is skipped, or the run rolls back."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import optimus
from optimus.api import train
from optimus.checkpoint.folder import list_checkpoints
from optimus.checkpoint.reader import Reader
from optimus.observe.metrics import read_metrics
from optimus.resilience.events import EventLog
from optimus.training import checks, step
from optimus.training.hooks.spikes import LEAST, Spikes


def spiking(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Multiplies the loss of these calls of a training step by ten."""
    assert checks  # imported before the replacement, so its dry run counts as no call
    right, calls = step.accumulate_gradients, iter(range(1000))

    def accumulate(*inputs: Any) -> tuple[torch.Tensor, int]:
        losses, predicted = right(*inputs)
        return losses * 10 if next(calls) in steps else losses, predicted

    monkeypatch.setattr(step, "accumulate_gradients", accumulate)


@pytest.fixture
def config(small_run: dict[str, Any]) -> dict[str, Any]:
    small_run["train"] |= {"steps": 30, "precision": "float32"}
    small_run["checkpoint"] = {"weights_every": 10}
    return small_run


def test_a_spike_is_left_out(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spiking(monkeypatch, {20})
    config["resilience"] = {"on_spike": "skip"}
    train(config)
    run = Path(config["train"]["output"])
    records = read_metrics(run)
    assert [record["step"] for record in records if record["skipped_steps"]] == list(range(21, 31))
    assert records[20]["loss"] > 5 * records[19]["loss"]
    assert Reader.open(list_checkpoints(run)[-1]).description.progress["updates"] == 29


def test_nothing_is_left_out_unless_asked(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spiking(monkeypatch, {20})
    train(config)
    assert read_metrics(Path(config["train"]["output"]))[-1]["skipped_steps"] == 0


def test_a_loss_that_stays_up_is_taken_for_what_it_is(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spiking(monkeypatch, set(range(20, 30)))
    config["resilience"] = {"on_spike": "skip", "max_skipped": 3}
    train(config)
    assert read_metrics(Path(config["train"]["output"]))[-1]["skipped_steps"] == 4


@pytest.mark.in_turn(0, 2)
def test_going_back(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run rolls back to the newest weights, then ends; the resumed run has no spike."""
    run, events = Path(config["train"]["output"]), EventLog(config["train"]["output"])
    config["resilience"] = {"on_spike": "rollback", "max_rollbacks": 1}
    config["checkpoint"]["asynchronous"] = True
    with monkeypatch.context() as patch:
        spiking(patch, {25})
        with pytest.raises(
            optimus.UserError, match=r"step 26: the loss .* The run is back at the weights of step 20: run again"
        ):
            train(config)
    assert [event["kind"] for event in events.read()] == ["failure", "rollback", "error"]
    with monkeypatch.context() as patch:
        spiking(patch, {17})  # calls from step 21 on
        train(config, ["train.stop_at=29"], resume=True)
    assert read_metrics(run)[20]["loss"] < 6
    with monkeypatch.context() as patch:
        spiking(patch, set())
        assert train(config, resume=True)["step"] == 30


def test_it_goes_back_only_so_often(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config["resilience"] = {"on_spike": "rollback", "max_rollbacks": 0}
    spiking(monkeypatch, {25})
    with pytest.raises(optimus.UserError, match=r"the run has already gone back 0 times \(resilience.max_rollbacks\)"):
        train(config)


def test_there_must_be_something_to_go_back_to(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config |= {"resilience": {"on_spike": "rollback"}, "checkpoint": {}}
    spiking(monkeypatch, {25})
    with pytest.raises(
        optimus.UserError, match=r"no weights of an earlier step are saved \(checkpoint.weights_every\)"
    ):
        train(config)


def test_equal_losses_give_no_limit() -> None:
    trainer: Any = SimpleNamespace(config=SimpleNamespace(resilience=SimpleNamespace(spike=6.0, max_skipped=3)))
    hook = Spikes(None)
    hook.load_state_dict({"losses": [2.5] * LEAST, "in_a_row": 0})
    assert hook.loss_limit(trainer) == math.inf
    hook.load_state_dict({"losses": [2.6], "in_a_row": 0})
    assert 2.6 < hook.loss_limit(trainer) < 2.8
