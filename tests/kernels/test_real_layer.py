"""The sparse block at the sizes of Mula-7B-A1B's layers on the CPU: what it keeps for the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optimus.model.moe.layer import MoeLayer
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.step_context import StepContext
from optimus.testing.memory import tracking

T, H, I, E, K = 1024, 2048, 1024, 64, 8
KEPT_PER_TOKEN = 40 * 1024  # bytes at most; x 4 KiB, the pre-activation 32 KiB, and rows that pad, weights and indices


class OneBlock(nn.Module):
    """What `recompute` looks for in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoeLayer(H, I, E, K)


def block() -> OneBlock:
    """In bf16; zeros, as bytes are counted and a router of zeros chooses the same experts for all, which is made even."""
    model = OneBlock().bfloat16()
    for parameter in model.parameters():
        parameter.detach().zero_()
    model.moe.router.routing = "uniform"
    return model


def kept(layer: Callable[[Tensor], Any], x: Tensor) -> int:
    """Bytes besides x, the parameters and what it returns that are alive between forward and backward pass."""
    with tracking() as bytes_alive:
        y, stats = layer(x)
        returned = [y, stats.counts_E, stats.probabilities_E, stats.z]
        return bytes_alive.current - sum(tensor.nbytes for tensor in returned)


def test_kept_for_the_backward_pass() -> None:
    x = torch.zeros(1, T, H, dtype=torch.bfloat16, requires_grad=True)
    assert kept(block().moe, x) + x.nbytes <= KEPT_PER_TOKEN * T


def test_recomputed_it_keeps_its_input_alone() -> None:
    moe, runner = block().moe, Recompute(Recomputation(("moe",)), StepContext())
    x = torch.zeros(1, T, H, dtype=torch.bfloat16, requires_grad=True)
    assert kept(lambda x: runner.modules(0, x, ("moe", moe)), x) == 0
