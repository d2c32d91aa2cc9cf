"""`train.precision: auto`: decided once, for all ranks, and kept by the run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import optimus
from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.config.tree import ModelConfig
from optimus.mesh import Mesh
from optimus.plan.job import job_of
from optimus.plan.machine import load_machine
from optimus.testing import run_ranks
from optimus.train import precision
from optimus.train.precision import bfloat16_to_float32, with_precision

CPU = torch.device("cpu")


def left_open(run: dict[str, Any]) -> dict[str, Any]:
    return run | {"train": {key: value for key, value in run["train"].items() if key != "precision"}}


def measures(monkeypatch: pytest.MonkeyPatch, *ratios: float) -> None:
    """Each measurement finds the next of them."""
    found = iter(ratios)
    monkeypatch.setattr(precision, "bfloat16_to_float32", lambda model: next(found))


def saved(run: dict[str, Any]) -> str:
    return str(yaml.safe_load((Path(run["train"]["output"]) / "config.yaml").read_text())["train"]["precision"])


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.1, "bfloat16"), (0.8, "bfloat16"), (0.81, "float32"), (9.0, "float32")]
)
def test_what_is_faster_is_taken(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ratio: float, expected: str
) -> None:
    measures(monkeypatch, ratio)
    found, why = with_precision(load_config(left_open(small_run)), CPU)
    assert found.train.precision == expected
    assert f"{ratio:.2f} times as long" in why


def test_what_is_given_is_not_measured(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measures(monkeypatch)
    config = load_config(small_run)
    assert with_precision(config, CPU) == (config, "")


def test_a_run_says_its_choice_writes_it_and_keeps_it(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = left_open(small_run)
    run["train"]["stop_at"] = 2
    measures(monkeypatch, 3.0, 3.0)  # before the run, where memory is checked, and when it begins
    optimus.train(run)
    assert saved(run) == "float32"
    assert "precision: float32 (auto: here bfloat16 takes 3.00 times as long as float32)" in capfd.readouterr().err
    measures(monkeypatch)
    run["train"]["stop_at"] = 4
    assert optimus.train(run, resume=True)["step"] == 4
    assert saved(run) == "float32"
    assert "precision: float32 (as the run has chosen before)" in capfd.readouterr().err


def decide(config: RunConfig) -> tuple[str, str]:
    """On a rank: the first finds bf16 slower, and the others, had they been asked, faster."""
    world = Groups(Mesh.of(dist.get_world_size())).world
    ratio = 2.0 if world.rank == 0 else 0.1
    precision.bfloat16_to_float32 = lambda model: ratio  # type: ignore[assignment]
    found, why = with_precision(config, CPU, world=world)
    return found.train.precision, why


def test_the_first_rank_decides_for_all(small_run: dict[str, Any]) -> None:
    found = run_ranks(decide, 3, load_config(left_open(small_run)))
    assert found == [("float32", " (auto: here bfloat16 takes 2.00 times as long as float32)")] * 3


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: True), "bfloat16"),
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation), "float32"),
        (SimpleNamespace(is_bf16_supported=lambda: True), "bfloat16"),
        (SimpleNamespace(is_bf16_supported=lambda: False), "float32"),
        (SimpleNamespace(), "float32"),
    ],
)
def test_accelerators_are_asked(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, module: Any, expected: str
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    measures(monkeypatch)
    found, _ = with_precision(load_config(left_open(small_run)), torch.device("meta"))
    assert found.train.precision == expected


def test_each_type_counts_by_its_best_time() -> None:
    """By a clock of ours: fp32 takes 0.04 and, undisturbed, 0.01; bf16 0.06 and, disturbed, 1."""
    model = ModelConfig(family="olmo", hidden=16, layers=1, heads=2, intermediate=32, vocab=64)
    ticks = iter([0.0, 0.0, 0.04, 0.04, 0.1, 0.1, 0.1, 0.11, 0.11, 1.11, 1.11])
    assert bfloat16_to_float32(model, lambda: next(ticks)) == pytest.approx(6)
    stopped = iter([0.0, 9.0, 9.01, 9.01, 9.03, 9.03])  # before it began
    assert bfloat16_to_float32(model, lambda: next(stopped)) == pytest.approx(2)


def test_the_measurement_measures() -> None:
    model = ModelConfig(family="olmo", hidden=64, layers=1, heads=2, intermediate=128, vocab=64)
    assert 0 < bfloat16_to_float32(model) < float("inf")


@pytest.mark.parametrize(
    ("machine", "expected"),
    [("dgx-h100", "bfloat16"), ("dgx-v100", "float32"), ("laptop", "float32"), ("tpu-v5e", "bfloat16")],
)
def test_the_planner_asks_the_machine(small_run: dict[str, Any], machine: str, expected: str) -> None:
    kind = load_machine(machine)
    assert job_of(load_config(left_open(small_run)), kind, Mesh()).train.precision == expected
    if "bf16" in kind.arithmetic:
        assert job_of(load_config(small_run), kind, Mesh()).train.precision == "bfloat16"
