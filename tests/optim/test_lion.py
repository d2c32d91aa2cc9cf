"""Lion equals the paper's algorithm."""

import torch
from torch import Tensor

from optimus.optim.lion import Lion
from optimus.optim.rule import OptimizerStep, Tile

RULE = Lion(beta1=0.9, beta2=0.99, weight_decay=0.3)


def algorithm_2(weight: Tensor, m: Tensor, gradient: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Returns (weight, m) by the paper's algorithm 2, line by line."""
    c = 0.9 * m + (1 - 0.9) * gradient
    weight = weight - lr * (torch.sign(c) + 0.3 * weight)
    m = 0.99 * m + (1 - 0.99) * gradient
    return weight, m


def test_equals_the_algorithm_over_several_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, m = torch.randn(1003, generator=generator), torch.zeros(1003)
    copy = torch.empty(1003, dtype=torch.bfloat16)
    expected = weight.double(), m.double()
    for step in range(1, 9):
        gradient = torch.randn(1003, generator=generator).bfloat16()
        gradient[:3] = 0  # at the first step, the sign is zero as well
        RULE.update(OptimizerStep(step, 0.1 / step, gradient_scale=0.5), Tile(weight, gradient, [m], copy))
        expected = algorithm_2(*expected, 0.5 * gradient.double(), 0.1 / step)
        for ours, theirs in zip((weight, m), expected):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
        assert copy.equal(weight.bfloat16())
