"""Operations with weights, any of which may be frozen."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from optimus.kernels.expert_mlp import expert_mlp
from optimus.kernels.linear import linear
from optimus.kernels.linear_cross_entropy import linear_cross_entropy
from optimus.kernels.rms_norm import rms_norm

Operation = Callable[..., Tensor]

# name: (operation, shapes of its inputs: the input first, then the weights)
OPERATIONS: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), [(6, 16), (16,)]),
    "linear": (linear, [(6, 16), (8, 16)]),
    "linear_cross_entropy": (
        lambda x, w: linear_cross_entropy(x, w, torch.arange(6, device=x.device)),
        [(6, 16), (32, 16)],
    ),
    "expert_mlp": (
        lambda x, up, down: expert_mlp(x, x[:, :2], torch.arange(12, device=x.device).view(6, 2) % 3, up, down),
        [(6, 16), (3, 32, 16), (3, 16, 16)],
    ),
}


def gradients(name: str, device: torch.device, frozen: int | None = None) -> tuple[list[Tensor | None], int]:
    """Returns (gradients of all inputs but the `frozen` one, floating-point operations of the products)."""
    function, shapes = OPERATIONS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    for number, each in enumerate(inputs):
        each.requires_grad_(number != frozen)
    with FlopCounterMode(display=False) as counter:
        function(*inputs).square().sum().backward()
    return [each.grad for each in inputs], counter.get_total_flops()


def check_frozen(name: str, device: torch.device) -> list[int]:
    """Asserts that all other gradients are unchanged if one input is frozen; returns the operations saved for each
    input."""
    whole, most = gradients(name, device)
    found = []
    for frozen in range(len(whole)):
        others, fewer = gradients(name, device, frozen)
        assert others[frozen] is None
        for number, gradient in enumerate(others):
            if number != frozen:
                torch.testing.assert_close(gradient, whole[number], rtol=0, atol=0)
        found.append(most - fewer)
    return found
