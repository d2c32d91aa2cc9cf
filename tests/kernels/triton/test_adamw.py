"""AdamW's kernel equals the update written line by line in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus.optim.adamw import AdamW, adamw_reference
from optimus.training.step import LARGEST_NORM

pytest.importorskip("triton")

from optimus.kernels.triton.adamw import adamw

RULE = AdamW(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
FACTORS = RULE.beta1, RULE.beta2, RULE.eps, RULE.weight_decay


@pytest.mark.parametrize("size", [3001, 1, 0])
def test_equals_the_definition(
    size: int, dtype: torch.dtype, random: Callable[..., Tensor], close: Callable[..., None]
) -> None:
    weight, m, v = (random(size, dtype=torch.float32) for _ in range(3))
    v.square_()
    copy = torch.full_like(weight, torch.nan, dtype=dtype)
    expected = [x.double() for x in (weight, m, v)]
    for step in (1, 2, 1000):
        gradient = random(size, dtype=dtype)
        adamw(FACTORS, step, 0.01, weight, gradient, m, v, gradient_scale=0.5, copy=copy)
        adamw_reference(RULE, step, 0.01, expected[0], gradient.double() * 0.5, *expected[1:])
        for ours, reference in zip((weight, m, v), expected):
            close(ours, reference)
        assert copy.equal(weight.to(dtype))


def test_the_largest_gradients_that_are_applied_leave_all_finite(random: Callable[..., Tensor]) -> None:
    weight, m, v = (random(300, dtype=torch.float32) for _ in range(3))
    v.square_()
    for step in (1, 2, 3):
        gradient = torch.full_like(weight, 2 * LARGEST_NORM)
        adamw(FACTORS, step, 0.01, weight, gradient, m, v, gradient_scale=0.5, copy=None)
        assert all(torch.isfinite(each).all() for each in (weight, m, v))
