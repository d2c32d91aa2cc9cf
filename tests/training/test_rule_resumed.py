"""Runs with each update rule, saved and resumed in other layouts, and continued with another rule."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from helpers.sweep import in_turns
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.store import load_model
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


def changed(config: dict[str, Any], output: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config["train"] |= {"output": str(output), "precision": "float32"}
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    return config


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("rule", in_turns(["muon", "lion", "schedule-free"], 2, always=1))
def test_resumed_on_another_layout(small_run: dict[str, Any], tmp_path: Path, rule: str) -> None:
    """A resumed run has the same bits on one rank, and close losses from four sharded ranks on two others."""
    by_rule = {"name": rule}
    whole, parted = (changed(small_run, tmp_path / name, optimizer=by_rule) for name in ("whole", "parted"))
    optimus.train(whole)
    optimus.train(parted, ["train.stop_at=3"])
    optimus.train(parted, resume=True)
    assert losses(tmp_path / "parted") == losses(tmp_path / "whole")
    spread = changed(small_run, tmp_path / "spread", optimizer=by_rule, train={"micro_batch": 2})
    sharded = ["state.shard=gradients", "state.chunk=3000", "parallel.expert=2"]
    optimus.train(spread, ["train.stop_at=3", *sharded], ranks=4)
    optimus.train(spread, ["parallel.tensor=2", "state.chunk=5000"], ranks=2, resume=True)
    assert losses(tmp_path / "spread") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


def test_weights_of_an_average_are_what_is_loaded(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Full checkpoints and those of weights alone hold the average, not the trained weights."""
    config = changed(small_run, tmp_path / "run", optimizer={"name": "schedule-free"}, checkpoint={"weights_every": 6})
    optimus.train(config)
    path = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert Reader.open(path).description.progress["weight_sum"] > 0
    full, weights = (
        dict(load_model(tmp_path / "run" / "checkpoints" / name).named_parameters())
        for name in ("step-00000006", "weights-00000006")
    )
    for name, parameter in full.items():
        torch.testing.assert_close(weights[name], parameter)


def test_another_rule(small_run: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = changed(small_run, run, checkpoint={"every": 2})
    optimus.train(config, ["train.stop_at=4"])
    with pytest.raises(
        UserError, match=r"step-00000004 was written with another update rule and lacks muon.momentum of "
    ):
        optimus.train(config, ["optimizer.name=muon"], resume=True)
    with pytest.raises(
        UserError, match=r"`fresh_optimizer=True` applies only to a run that resumes: set `resume=True` too"
    ):
        optimus.train(config, ["optimizer.name=muon"], fresh_optimizer=True)
    found = optimus.train(config, ["optimizer.name=muon", "train.stop_at=5"], resume=True, fresh_optimizer=True)
    assert found["step"] == 5
    assert optimus.train(config, ["optimizer.name=muon"], resume=True)["step"] == 6  # the momentum of step 5 is resumed
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match=r"step-00000006 was written with another update rule and lacks adamw.m of "):
        optimus.train(config, ["train.steps=8"], resume=True)
