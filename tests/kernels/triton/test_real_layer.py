"""The experts at the sizes of Mula-7B-A1B's layers: result, gradients, and bytes saved for the backward pass.

The interpreter's time grows with the elements read or written, so it gets few tokens and few local experts.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from optimus.kernels.expert_mlp import expert_mlp, expert_mlp_reference
from optimus.kernels.gradient_buffer import TensorBuffer
from optimus.testing.memory import tracking

pytest.importorskip("triton")

from optimus.kernels.triton.tuning import Tiles
from optimus.testing.trial import trial

NATIVE = torch.accelerator.is_available()
DTYPE = torch.bfloat16 if NATIVE else torch.float16
H, I, E, K = 2048, 1024, 64 if NATIVE else 8, 8
T = 256 if NATIVE else 3
HERE = list(range(E)) if NATIVE else [2, 7]  # experts that tokens may choose; all others are on other ranks
KEPT_PER_TOKEN = 40 * 1024  # at most; x is 4 KiB of it and the pre-activation 32 KiB

Random = Callable[..., Tensor]
Close = Callable[[Tensor, Tensor], None]


@pytest.fixture(autouse=True)
def large_tiles() -> Iterator[None]:
    """Makes tiles large for the interpreter, in which every program costs time."""
    with ExitStack() as stack:
        for kernel in () if NATIVE else ("up", "down", "down_backward", "up_backward", "weight_gradient"):
            rows = 512 if kernel == "weight_gradient" else 16
            stack.enter_context(trial(kernel, Tiles(rows, columns=1024, inner=64, warps=4, stages=1)))
        yield


def inputs_of(random: Random) -> list[Tensor]:
    """Returns [x, weights, gate_up, down] with zeros for unchosen experts."""
    x, weights = random(T, H, dtype=DTYPE), random(T, K, dtype=DTYPE)
    gate_up, down = x.new_zeros(E, 2 * I, H), x.new_zeros(E, H, I)
    gate_up[HERE] = random(len(HERE), 2 * I, H, dtype=DTYPE) / 50
    down[HERE] = random(len(HERE), H, I, dtype=DTYPE) / 50
    return [x.requires_grad_() for x in (x, weights, gate_up, down)]


def choices(device: torch.device) -> Tensor:
    """Returns positions in `HERE`; -1 for experts of other ranks."""
    place = torch.rand(T, max(K, len(HERE)), generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :K]
    return place.masked_fill(place >= len(HERE), -1).to(device)


@pytest.mark.in_turn(1, 3)
def test_equals_the_definition(device: torch.device, random: Random, close: Close) -> None:
    x, weights, gate_up, down = inputs_of(random)
    place = choices(device)
    indices = torch.tensor([*HERE, -1], device=device)[place]
    buffers = TensorBuffer(torch.zeros_like(gate_up)), TensorBuffer(torch.zeros_like(down))
    y = expert_mlp(x, weights, indices, gate_up, down, buffers)
    gradients = list(torch.autograd.grad(y, [x, weights], torch.ones_like(y)))
    for buffer in buffers:
        gradients.append(buffer.grad[HERE].clone())
        buffer.grad[HERE] = 0
        assert not buffer.grad.any()

    few = [x, weights, gate_up[HERE], down[HERE]]
    leaves = [value.detach().double().requires_grad_() for value in few]
    expected = expert_mlp_reference(leaves[0], leaves[1], place, *leaves[2:])
    close(y, expected)
    for ours, reference in zip(gradients, torch.autograd.grad(expected, leaves, torch.ones_like(expected))):
        close(ours, reference)


def test_kept_for_the_backward_pass(device: torch.device, random: Random) -> None:
    """Saved memory besides the parameters stays within its bound."""
    x, weights, gate_up, down = inputs_of(random)
    indices = torch.tensor([*HERE, -1], device=device)[choices(device)]
    with tracking() as alive:
        y = expert_mlp(x, weights, indices, gate_up, down)
        gc.collect()  # collects reference cycles of the interpreter
        kept = alive.current - y.nbytes + x.nbytes + weights.nbytes
    assert 36 * 1024 * T < kept <= KEPT_PER_TOKEN * T
