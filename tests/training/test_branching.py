"""A trunk with a constant learning rate, and branches with their own cooldowns."""

import copy
from pathlib import Path
from typing import Any

import pytest

import optimus
from helpers.sweep import in_turns
from optimus.observe.metrics import read_metrics


def with_schedule(config: dict[str, Any], output: Path, steps: int, **schedule: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config["train"] |= {"output": str(output), "steps": steps}
    config["lr_schedule"] |= schedule
    config["checkpoint"] = {"every": 4, "keep": None}
    return config


def curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["lr"]) for record in read_metrics(folder)]


@pytest.fixture
def trunk(small_run: dict[str, Any], tmp_path: Path) -> Path:
    optimus.train(with_schedule(small_run, tmp_path / "trunk", 6, name="constant"))
    return tmp_path / "trunk" / "checkpoints" / "step-00000004"


@pytest.mark.parametrize("ranks", in_turns([1, 2], 2, always=1))
def test_a_branch_is_the_run_that_cooled_down_from_the_start(
    small_run: dict[str, Any], tmp_path: Path, trunk: Path, ranks: int
) -> None:
    """A branch has the steps, losses and learning rates of a run with one cooldown, and leaves the trunk unchanged.

    Two ranks share the optimizer state that one rank saved.
    """
    cooling: dict[str, Any] = {"name": "wsd", "cooldown_steps": 4}
    optimus.train(with_schedule(small_run, tmp_path / "whole", 8, **cooling))
    before = sorted((path, path.stat().st_mtime_ns) for path in trunk.parent.parent.rglob("*"))
    branch = with_schedule(small_run, tmp_path / "branch", 8, branch_from=str(trunk), **cooling)
    branch["state"] = {"shard": "optimizer"}
    optimus.train(branch, ranks=ranks)
    whole, found = curve(tmp_path / "whole")[4:], curve(tmp_path / "branch")
    assert [step for step, _, _ in found] == [5, 6, 7, 8]
    assert (
        found == whole
        if ranks == 1
        else [each[1:] for each in found] == [pytest.approx(each[1:], rel=1e-3) for each in whole]
    )
    assert sorted((path, path.stat().st_mtime_ns) for path in trunk.parent.parent.rglob("*")) == before


@pytest.mark.in_turn(2, 3)
def test_a_branch_that_was_ended_goes_on(small_run: dict[str, Any], tmp_path: Path, trunk: Path) -> None:
    branch = with_schedule(small_run, tmp_path / "branch", 8, name="wsd", branch_from=str(trunk))
    parted = copy.deepcopy(branch)
    parted["train"]["stop_at"] = 6
    assert optimus.train(parted)["step"] == 6
    assert optimus.train(branch, resume=True)["step"] == 8
    once = with_schedule(branch, tmp_path / "once", 8)
    optimus.train(once)
    assert curve(tmp_path / "branch") == curve(tmp_path / "once")


def test_what_cannot_be_branched_from_is_refused(small_run: dict[str, Any], tmp_path: Path, trunk: Path) -> None:
    def refusal(branch_from: Path, steps: int = 8, **train: Any) -> str:
        branch = with_schedule(small_run, tmp_path / "branch", steps, branch_from=str(branch_from))
        branch["train"] |= train
        with pytest.raises(optimus.UserError) as error:
            optimus.train(branch)
        assert not (tmp_path / "branch" / "metrics.jsonl").exists()
        return str(error.value)

    assert "is at step 4, but the run ends at 4: raise train.steps" in refusal(trunk, steps=4)
    assert "nowhere" in refusal(tmp_path / "nowhere")
    assert "seed" in refusal(trunk, seed=3)
