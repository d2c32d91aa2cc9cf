"""Killed runs of adapted models go on: on their layout bit for bit, on another one within rounding."""

import copy
import random
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import optimus
from helpers.adapted import config_json
from helpers.killing import check_equal, killed
from helpers.sweep import in_turns
from optimus.checkpoint.folder import list_checkpoints, step_of
from optimus.observe.metrics import read_metrics

STEPS, EVERY, LONGEST = 12, 2, 600.0
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"state": {"shard": "parameters"}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "tensor": {"parallel": {"tensor": 2}},
    "disk": {"state": {"shard": "parameters", "offload": "disk"}},
    "v-half": {
        "parallel": {
            "pipeline": 2,
            "schedule": "v-half",
            "stages_per_rank": 2,
            "layers": [{"layers": "1-2", "recompute": ["block"]}],
        }
    },
}


class Kills(NamedTuple):
    """A family, the layout of a run, and the one on which the run goes on after its last kill."""

    family: str
    layout: str
    other: str
    asynchronous: bool


CASES = [
    Kills("llama", "zero3", "pipeline", True),
    Kills("llama", "pipeline", "zero3", False),
    Kills("phi3", "pipeline", "tensor", True),
    Kills("gpt2", "zero3", "pipeline", False),
    Kills("granitemoe", "pipeline", "zero3", True),
    Kills("gemma3_text", "tensor", "disk", True),
    Kills("falcon_h1", "zero3", "pipeline", False),
    Kills("glm4", "disk", "tensor", True),
    Kills("olmo2", "tensor", "zero3", False),
    Kills("deepseek_v4", "pipeline", "zero3", False),
    Kills("llama", "v-half", "zero3", True),
    Kills("granitemoe", "zero3", "v-half", False),
]


def on(config: dict[str, Any], layout: str, output: Path) -> dict[str, Any]:
    """Returns the configuration on a layout, with a folder."""
    found = copy.deepcopy(config) | LAYOUTS[layout]
    found["train"]["output"] = str(output)
    return found


def interrupted(config: dict[str, Any], signs: Path, draw: random.Random, duration: float) -> int:
    """Starts, kills and resumes a run until it was killed twice or more and has a complete checkpoint; returns the number
    of kills."""
    folder, kills = Path(config["train"]["output"]), 0
    while kills < 2 or not list_checkpoints(folder):
        aimed = draw.choice([None, "copying", "writing", "committing"])
        if killed(config, signs, draw.triangular(0.0, duration, 0.8 * duration), aimed):
            kills += 1
            # A machine may be slower than when the duration was measured: the next kills come later.
            duration *= 1.0 if list_checkpoints(folder) else 1.25
        else:  # it ended before: the next kills come sooner
            shutil.rmtree(folder)
            duration, kills = 0.7 * duration, 0
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("case", in_turns(CASES, 5), ids=lambda case: f"{case.family}-{case.layout}")
def test_a_killed_run_goes_on(small_run: dict[str, Any], tmp_path: Path, case: Kills) -> None:
    draw, signs = random.Random(str(case)), tmp_path / "signs"
    small_run |= {"model": {"transformers": config_json(case.family)}}
    small_run["train"] |= {"precision": "float32", "steps": STEPS}
    small_run["checkpoint"] = {"every": EVERY, "asynchronous": case.asynchronous}
    undisturbed, folder, moved = (tmp_path / name for name in ("undisturbed", "run", "moved"))
    began = time.monotonic()
    assert not killed(on(small_run, case.layout, undisturbed), signs, LONGEST)
    kills = interrupted(on(small_run, case.layout, folder), signs, draw, time.monotonic() - began)
    steps = [step_of(path) for path in list_checkpoints(folder)]
    shutil.copytree(folder, moved)
    assert not killed(on(small_run, case.layout, folder), signs, LONGEST)
    check_equal(folder, undisturbed)

    assert not killed(on(small_run, case.other, moved), signs, LONGEST)
    losses = [[record["loss"] for record in read_metrics(run)] for run in (moved, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    weights = [dict(optimus.load_model(run).named_parameters()) for run in (moved, undisturbed)]
    # Gradients of key biases are all rounding. AdamW moves a weight by at most the learning rate in a step (Kingma and Ba
    # 2015, section 2.1), so those of two runs differ by twice the sum of the rates.
    apart = 2 * STEPS * small_run["lr_schedule"]["lr"]
    for name, parameter in weights[1].items():
        atol = apart if name.endswith("k_proj.bias") else 1e-5
        torch.testing.assert_close(weights[0][name], parameter, rtol=0, atol=atol, msg=name)
    print(f"{kills} kills, checkpoints of steps {steps}")
