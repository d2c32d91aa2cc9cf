"""The rough sum of squares: within its bound of float64, and not finite where an element is not."""

import pytest
import torch

from optimus.kernels.square_sum import BLOCK, rough_square_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2 * BLOCK + 17, 1, 0])
def test_is_within_one_percent(size: int, dtype: torch.dtype) -> None:
    """An fp32 sum of a block's n squares has a relative error of at most n 2^-24, here 2^-7."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    expected = x.double().square().sum()
    assert (rough_square_sum(x) - expected).abs() <= 2.0**-7 * 1.01 * expected


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e30])
def test_what_does_not_fit_is_not_finite(bad: float) -> None:
    x = torch.ones(2 * BLOCK)
    x[BLOCK + 3] = bad
    assert not rough_square_sum(x).isfinite()
