"""The sparse block at the sizes of Mula-7B-A1B's layers on the CPU saves the expected bytes for the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optimus.model.architecture import ModelConfig
from optimus.model.moe.layer import MoeLayer
from optimus.model.units import Unit
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.step_context import StepContext
from optimus.testing.memory import tracking

T, H, I, E, K = 1024, 2048, 1024, 64, 8
# The most bytes: x 4 KiB, the pre-activation 32 KiB, and padding, weights and indices.
KEPT_PER_TOKEN = 40 * 1024


def layer() -> MoeLayer:
    """Returns a block in bf16 with zero weights: only bytes are counted, and forced balance spreads the tokens over the
    experts."""
    sizes = {"hidden": H, "heads": 1, "intermediate": I, "experts": E, "experts_per_token": K}
    config = ModelConfig.model_validate({"family": "olmoe", "layers": 1, "vocab": 8, **sizes})
    found = MoeLayer(config, force_balanced=True).bfloat16()
    for parameter in found.parameters():
        parameter.detach().zero_()
    return found


def kept(layer: Callable[[Tensor], Any], x: Tensor) -> int:
    """Returns the bytes alive between forward and backward pass, without x, parameters and outputs."""
    with tracking() as bytes_alive:
        y, stats = layer(x)
        returned = [y, stats.counts_E, stats.probabilities_E, stats.z]
        return bytes_alive.current - sum(tensor.nbytes for tensor in returned)


def test_kept_for_the_backward_pass() -> None:
    x = torch.zeros(1, T, H, dtype=torch.bfloat16, requires_grad=True)
    assert kept(layer(), x) + x.nbytes <= KEPT_PER_TOKEN * T


def test_recomputed_it_keeps_its_input_alone() -> None:
    unit = Unit("moe", layer())
    Recompute(Recomputation(), StepContext()).arrange_unit(unit, ["moe"])
    x = torch.zeros(1, T, H, dtype=torch.bfloat16, requires_grad=True)
    assert kept(unit, x) == 0
