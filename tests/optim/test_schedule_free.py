"""Schedule-free AdamW equals the paper's algorithm."""

import torch
from torch import Tensor

from optimus.optim.rule import OptimizerStep, Tile
from optimus.optim.schedule_free import ScheduleFree

RULE = ScheduleFree(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
STEPS, WARMUP, LR = 20, 5, 0.01


def loss_gradient(y: Tensor) -> Tensor:
    """Returns the gradient of a quadratic loss with very different curvatures."""
    return torch.logspace(-3, 1, y.numel(), dtype=y.dtype) * (y - 1)


def algorithm_1(x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns (y, x, z) of every step by the paper's algorithm 1, line by line; y is where the step takes its gradient."""
    z, v, squares, found = x, torch.zeros_like(x), 0.0, []
    for t in range(1, STEPS + 1):
        y = (1 - 0.9) * z + 0.9 * x
        g = loss_gradient(y)
        v = 0.99 * v + (1 - 0.99) * g**2
        lr = LR * (1 - 0.99**t) ** 0.5 * min(1, t / WARMUP)
        z = z - lr * g / (v.sqrt() + 1e-8) - lr * 0.1 * y
        squares += lr**2
        c = lr**2 / squares
        x = (1 - c) * x + c * z
        found.append((y, x, z))
    return found


def test_equals_the_algorithm_with_a_warm_up() -> None:
    """The rule equals the algorithm in float64, except for gradients, which the rule takes in fp32."""
    x = torch.randn(1003, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept, copy, counters = (
        [torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)],
        x.clone(),
        {"weight_sum": 0.0},
    )
    RULE.begin(x, kept)
    for step, (y, *expected) in enumerate(algorithm_1(x.clone()), start=1):
        torch.testing.assert_close(copy, y, rtol=0, atol=1e-8)
        lr = LR * min(1, step / WARMUP)
        counters = RULE.count(counters, step, lr)
        now = OptimizerStep(step, lr, gradient_scale=1.0, counters=counters)
        RULE.update(now, Tile(x, loss_gradient(copy), kept, copy))
        for ours, theirs in zip((x, kept[0]), expected):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def test_what_is_computed_with_is_what_an_update_leaves() -> None:
    """`computed` restores the 16-bit weights of the last update after a checkpoint is read; before any update, it
    copies the weights."""
    x, gradient = torch.randn(2, 1003, generator=torch.Generator().manual_seed(0))
    kept, (copy, computed) = list(torch.empty(2, 1003)), torch.empty(2, 1003, dtype=torch.bfloat16)
    counters = {"weight_sum": 0.0}
    RULE.begin(x, kept)
    RULE.computed(x, kept, computed)
    assert computed.equal(x.bfloat16())
    for step in (1, 2):
        counters = RULE.count(counters, step, LR)
        RULE.update(OptimizerStep(step, LR, gradient_scale=0.5, counters=counters), Tile(x, gradient, kept, copy))
    RULE.computed(x, kept, computed)
    assert computed.equal(copy)
    assert not computed.equal(x.bfloat16())
