"""Training on the phantom gives the numbers of the CPU; mistakes in the order of copies and updates are found."""

from typing import Any
from unittest import mock

import pytest
import torch

from helpers.equality import Trained, compare
from helpers.phantom import on_phantom
from helpers.whole import whole_state
from optimus.state.transfers import StreamTransfers
from optimus.testing.ranks import RankError
from optimus.testing.steps import Steps

STEPS = 3
SIZES = {"hidden": 64, "layers": 2, "heads": 2, "intermediate": 64, "vocab": 320}
DENSE = {"family": "llama", **SIZES}
EXPERTS = {"family": "olmoe", **SIZES, "experts": 4, "experts_per_token": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "ZeRO-3": (DENSE, {"state": {"shard": "parameters"}}),
    "experts": (EXPERTS, {}),
    "recomputed": (EXPERTS, {"recompute": ["block"]}),
    "optimizer on the host": (DENSE, {"state": {"residency": "optimizer", "update_on": "host", "device_states": 0.0}}),
    "all on the host": (EXPERTS, {"state": {"residency": "all", "update_on": "device", "cache": 2, "device_states": 0.0}}),
}


def configured(layout: str) -> dict[str, Any]:
    model, more = LAYOUTS[layout]
    return {
        "model": model,
        "data": {"path": "random"},
        "train": {"output": "none", "steps": 10, "global_batch": 4, "micro_batch": 2, "sequence_length": 32, "precision": "float32"},
        "lr_schedule": {"peak": 3e-3, "minimum": 3e-4, "warmup_steps": 2},
        **more,
    }


def trained(config: dict[str, Any], device: str) -> Trained:
    steps = Steps(config, device=device)
    results = [steps.train() for _ in range(STEPS)]
    return Trained(results, whole_state(steps.state, everywhere=False))


def both(layout: str) -> None:
    torch.compiler.set_stance("force_eager")  # of the update on the host
    compare(trained(configured(layout), "phantom"), trained(configured(layout), "cpu"), layout, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_of_the_cpu(layout: str) -> None:
    on_phantom(both, 1, layout)
