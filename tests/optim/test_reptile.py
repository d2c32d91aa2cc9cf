"""Reptile steps interpolate back to the weights of the last period, around any rule; checkpoints keep their buffer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from helpers.drawing import config_of
from helpers.equality import compare, train_steps
from helpers.sweep import in_turns
from optimus.checkpoint.store import load_model
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics
from optimus.optim.lion import Lion
from optimus.optim.reptile import Reptile
from optimus.optim.rule import OptimizerStep, Tile
from optimus.testing import run_ranks


def test_every_third_update_goes_back_to_a_share_of_the_way() -> None:
    inner = Lion(weight_decay=0.1, beta1=0.9, beta2=0.99)
    rule = Reptile(inner=inner, weight_decay=0.1, every=3, share=0.25)
    assert rule.kinds == ("lion.m", "reptile.start")
    weight, plain = torch.arange(4.0), torch.arange(4.0)
    kept, m, start = [torch.ones(4), torch.ones(4)], torch.zeros(4), plain.clone()
    rule.begin(weight, kept)
    for step in range(1, 8):
        gradient = torch.randn(4, generator=torch.Generator().manual_seed(step))
        copied = torch.zeros(4, dtype=torch.bfloat16)
        rule.update(OptimizerStep(step, 0.1), Tile(weight, gradient, kept, copied))
        inner.update(OptimizerStep(step, 0.1), Tile(plain, gradient, [m]))
        if step % 3 == 0:
            start = start + 0.25 * (plain - start)
            plain = start.clone()
        torch.testing.assert_close(weight, plain)
        assert torch.equal(copied, weight.bfloat16())


def test_a_run_is_that_of_shorter_ones_put_together(small_run: dict[str, Any], tmp_path: Path) -> None:
    """A step of 1 changes nothing; with a smaller one, the weights after the period lie between those at its start and
    end."""

    def run(name: str, **optimizer: Any) -> Path:
        tree = copy.deepcopy(small_run)
        tree["train"] |= {"output": str(tmp_path / name), "precision": "float32", "steps": 3}
        tree["lr_schedule"] = {"name": "constant", "lr": 1e-2, "warmup_steps": 0}
        optimus.train(tree | {"optimizer": optimizer})
        return tmp_path / name

    plain, whole, part = run("plain"), run("whole", reptile_every=3, reptile_step=1.0), run("part", reptile_every=3)
    losses = [[record["loss"] for record in read_metrics(each)] for each in (plain, whole, part)]
    assert losses[0] == losses[1] == losses[2]  # losses before the Reptile step
    begun = copy.deepcopy(small_run)
    begun["train"] |= {"output": str(tmp_path / "begun"), "precision": "float32", "steps": 1}
    begun["lr_schedule"] = {"name": "constant", "lr": 1e-30, "warmup_steps": 0}
    optimus.train(begun)
    weights = [dict(load_model(each).named_parameters()) for each in (tmp_path / "begun", plain, whole, part)]
    for name, first in weights[0].items():
        torch.testing.assert_close(weights[1][name], weights[2][name], rtol=0, atol=1e-7)
        torch.testing.assert_close(weights[3][name], first.lerp(weights[1][name], 0.1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_resumes_within_a_period_bit_for_bit(small_run: dict[str, Any], tmp_path: Path, name: str) -> None:
    small_run["optimizer"] = {"name": name, "reptile_every": 4}
    small_run["train"]["precision"] = "float32"
    optimus.train(small_run)
    parted = copy.deepcopy(small_run)
    parted["train"]["output"] = str(tmp_path / "parted")
    first = copy.deepcopy(parted)
    first["train"]["stop_at"] = 2
    optimus.train(first)
    optimus.train(parted, resume=True)
    whole, two = (read_metrics(Path(each["train"]["output"])) for each in (small_run, parted))
    assert [each["loss"] for each in whole] == [each["loss"] for each in two]


@pytest.mark.parametrize(
    "sections",
    in_turns([{"state": {"shard": "parameters", "chunk": 500}}, {"parallel": {"tensor": 2}}], 2, always=1),
    ids=str,
)
def test_layouts_equal_one_process(sections: dict[str, Any]) -> None:
    config = config_of("dense") | {"optimizer": {"name": "muon", "reptile_every": 2, "reptile_step": 0.5}}
    for found in run_ranks(train_steps, 2, config | sections, 4):
        compare(found, train_steps(config, 4), str(sections), 2e-5)


def test_what_makes_no_sense_is_refused(small_run: dict[str, Any]) -> None:
    for optimizer, expected in (
        ({"reptile_step": 0.2}, "reptile_step needs reptile_every"),
        ({"name": "schedule-free", "reptile_every": 3}, "schedule-free averages its weights already"),
    ):
        with pytest.raises(UserError, match=expected):
            optimus.train(small_run | {"optimizer": optimizer})
