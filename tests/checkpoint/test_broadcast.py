"""Loading chunks longer than every size threshold gives the same weights for every way to send them to other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.drawing import config_of
from helpers.whole import whole_state
from optimus.checkpoint.factors import is_factor
from optimus.checkpoint.folder import Description, step_folder
from optimus.checkpoint.loading import Send
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.store import load_state
from optimus.comm.algorithms import LONG_SUM
from optimus.testing import run_ranks
from optimus.testing.steps import Steps

LONG = LONG_SUM // 4  # fp32 elements
MODEL = {"family": "olmo", "hidden": 64, "layers": 1, "heads": 2, "intermediate": 64, "vocab": LONG // 64 + 2}
CONFIG: dict[str, Any] = config_of("dense", state={"chunk": 2 * LONG}) | {"model": MODEL}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A full checkpoint of one process after a training step, and the state in the checkpoint."""
    run = tmp_path_factory.mktemp("run")
    steps = Steps(CONFIG)
    steps.train()
    about = Description(steps.config.model, 24, 1, True, "float32", progress={"updates": 1})
    Saver(steps.state, scattered=True, beside=False).save(Target(step_folder(run, 1), about))
    return step_folder(run, 1), whole_state(steps.state)


def loaded(path: Path, send: Send) -> tuple[int, dict[str, Tensor]]:
    """Returns the elements of this rank's longest chunk, and the loaded state."""
    steps = Steps(CONFIG)
    load_state(steps.state, path, model=steps.config.model, full=True, send=send)
    found = {}
    for chunk in steps.state.chunks:
        with chunk.states() as parts:
            for kind, part in parts.items():
                for slot in chunk.plan.slots:
                    found[f"{kind}.{slot.name}"] = part[slot.start : slot.end].view(slot.shape).clone()
    return max(chunk.plan.size for chunk in steps.state.chunks), found


def with_factors(path: Path, send: Send) -> dict[str, bool]:
    """Loads weights into a state with low-rank factors. Returns, for each factor, whether it is zero."""
    train = CONFIG["train"] | {"freeze": ["matrix"], "lora_rank": 2}
    steps = Steps(CONFIG | {"train": train})
    load_state(steps.state, path, model=steps.config.model, full=False, send=send)
    tensors = whole_state(steps.state)
    return {key: not tensor.any() for key, tensor in tensors.items() if key.startswith("model.") and is_factor(key)}


@pytest.mark.parametrize("send", ["broadcast", "allreduce", "none"])
def test_factors_that_the_checkpoint_lacks_are_zero(saved: tuple[Path, dict[str, Tensor]], send: Send) -> None:
    zero = with_factors(saved[0], send)
    assert zero
    assert all(zero.values()), zero


@pytest.mark.parametrize("send", ["broadcast", "allreduce", "none"])
def test_every_rank_loads_what_was_saved(saved: tuple[Path, dict[str, Tensor]], send: Send) -> None:
    path, right = saved
    for longest, found in run_ranks(loaded, 2, path, send):
        assert longest >= LONG
        assert found.keys() == right.keys()
        assert [key for key, tensor in found.items() if not torch.equal(tensor, right[key])] == []
