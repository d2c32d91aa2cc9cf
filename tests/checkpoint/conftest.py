"""Fixtures: a stopped run with two checkpoints, and a copy to damage."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

import optimus


@pytest.fixture(scope="module")
def stopped(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The configuration of a run that stopped with checkpoints of steps 2 and 4."""
    config: dict[str, Any] = {
        "model": {"family": "olmo", "hidden": 16, "layers": 1, "heads": 2, "intermediate": 16, "vocab": 320},
        "data": {"path": str(prepared)},
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 2, "sequence_length": 32, "precision": "bfloat16"},
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 2},
        "checkpoint": {"every": 2},
        "observe": {"tensorboard": False},
    }
    config["train"]["output"] = str(tmp_path_factory.mktemp("stopped") / "run")
    optimus.train(config, ["train.stop_at=4"])
    return config


@pytest.fixture
def run(stopped: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The configuration of a copy of the stopped run; tests may damage the copy."""
    config = copy.deepcopy(stopped)
    config["train"]["output"] = str(tmp_path / "run")
    shutil.copytree(stopped["train"]["output"], tmp_path / "run")
    return config
