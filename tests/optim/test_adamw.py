"""The fused AdamW update equals its definition and torch's optimizer."""

import pytest
import torch
from torch import Tensor

from optimus.optim.adamw import AdamW, adamw_reference
from optimus.optim.rule import OptimizerStep, Tile

RULE = AdamW(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


def start(n: int = 1003) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator), torch.zeros(n), torch.zeros(n)]


def gradients(steps: int, n: int = 1003) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator) * 10.0 ** (-i) for i in range(steps)]


def update(rule: AdamW, step: int, lr: float, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
    rule.update(OptimizerStep(step, lr), Tile(weight, gradient, (m, v)))


@pytest.mark.parametrize("update", [update, adamw_reference])
def test_equals_torch_over_several_steps(update: object) -> None:
    weight, m, v = start()
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, foreach=False)
    for step, gradient in enumerate(gradients(8), start=1):
        lr = 1e-2 / step
        update(RULE, step, lr, weight, gradient, m, v)  # type: ignore[operator]
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(weight, theirs.detach(), rtol=0, atol=1e-6)
    state = optimizer.state[theirs]
    torch.testing.assert_close(m, state["exp_avg"], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(v, state["exp_avg_sq"], rtol=1e-5, atol=1e-8)


def test_the_first_step_by_hand() -> None:
    """The first step is lr * (sign + decay) for any gradient: the bias corrections cancel the moments' factors."""
    weight, m, v = torch.tensor([2.0, -3.0]), torch.zeros(2), torch.zeros(2)
    update(RULE, 1, 0.5, weight, torch.tensor([4.0, -1e-3]), m, v)
    torch.testing.assert_close(weight, torch.tensor([2 * 0.95 - 0.5, -3 * 0.95 + 0.5]), rtol=1e-4, atol=0)
    torch.testing.assert_close(m, torch.tensor([0.4, -1e-4]))
    torch.testing.assert_close(v, torch.tensor([0.16, 1e-8]))


def test_only_views_given_are_touched() -> None:
    buffers = start(64)
    before = [buffer.clone() for buffer in buffers]
    update(RULE, 1, 0.1, *(b[16:32] for b in (buffers[0], gradients(1, 64)[0], buffers[1], buffers[2])))
    for buffer, old in zip(buffers, before):
        assert torch.equal(buffer[:16], old[:16])
        assert torch.equal(buffer[32:], old[32:])
        assert not torch.equal(buffer[16:32], old[16:32])
