"""Losses that compute gradients in the forward pass keep small gradients in float16, if their seed is known."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from optimus.kernels.linear_divergence import SoftTargets, linear_divergence, linear_divergence_reference
from optimus.kernels.linear_token_loss import linear_token_loss

ROWS, HIDDEN, VOCAB, COUNT = 60, 16, 40, 4e6
TEACHER = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3))
SOFT = SoftTargets(lambda rows: TEACHER[rows], 1.0)


def token_losses(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV, target_T, reduction="none")


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "cross-entropy": (
        lambda x, w, t, seed: linear_cross_entropy(x, w, t, COUNT, seed=seed),
        lambda x, w, t: linear_cross_entropy_reference(x, w, t, COUNT),
    ),
    "token loss": (
        lambda x, w, t, seed: linear_token_loss(x, w, t, COUNT, token_losses, seed=seed),
        lambda x, w, t: linear_cross_entropy_reference(x, w, t, COUNT),
    ),
    "divergence": (
        lambda x, w, t, seed: linear_divergence(x, w, SOFT, t, COUNT, seed=seed),
        lambda x, w, t: linear_divergence_reference(x, w, TEACHER.double(), 1.0, t) / COUNT,
    ),
}


def gradients(loss: Callable[..., Tensor], dtype: torch.dtype, outer: float, *seed: float) -> list[Tensor]:
    """Returns the gradients of x and w in float64, from a backward pass that begins with the gradient `outer`."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, HIDDEN, generator=generator).half().to(dtype).requires_grad_() for n in (ROWS, VOCAB))
    target_T = torch.randint(VOCAB, (ROWS,), generator=generator)
    w.grad_dtype = None  # the gradient may have another type
    (loss(x, w, target_T, *seed) * outer).backward()
    assert x.grad is not None
    assert w.grad is not None
    return [x.grad.double() / outer, w.grad.double() / outer]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_large_batch(name: str) -> None:
    """Gradients of logits for 4 million predicted tokens are below 2.5e-7, four times the smallest number of float16.

    With a seed of 2^20, they have the relative error of their roundings: of logits of up to 16, of 2^-11 * 16 = 2^-7,
    and of the gradients and products. The gradient that arrives may differ from the seed. Without a seed, they
    underflow.
    """
    ours, definition = LOSSES[name]
    right = gradients(definition, torch.float64, 1.0)
    for outer in (2.0**20, 3 * 2.0**18):
        for found, expected in zip(gradients(ours, torch.float16, outer, 2.0**20), right, strict=True):
            assert (found - expected).norm() < 2**-7 * expected.norm()
    x_grad, _ = gradients(ours, torch.float16, 2.0**20, 1.0)
    assert (x_grad - right[0]).norm() > 2**-4 * right[0].norm(), "the seed makes no difference: take a larger batch"


def test_a_seed_that_is_too_large_overflows() -> None:
    """An overflow of a gradient in the forward pass shows in the gradient that arrives."""
    x_grad, w_grad = gradients(LOSSES["cross-entropy"][0], torch.float16, 2.0**60, 2.0**60)
    assert not math.isfinite(float(x_grad.sum() + w_grad.sum()))


@pytest.mark.parametrize("name", LOSSES)
def test_without_rounding_the_seed_changes_nothing(name: str) -> None:
    """Powers of two do not round in float64."""
    ours, _ = LOSSES[name]
    with_seed, without = (gradients(ours, torch.float64, 1.0, seed) for seed in (2.0**20, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(with_seed, without, strict=True))
