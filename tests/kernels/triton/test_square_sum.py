"""The kernel for the sum of squares equals float64."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from optimus.kernels import square_sum as operation
from optimus.kernels.square_sum import square_sum

pytest.importorskip("triton")

Random = Callable[..., Tensor]


@pytest.mark.parametrize("size", [3 * 8192 + 17, 8192, 1, 0])
def test_is_as_exact_as_its_type(size: int, dtype: torch.dtype, random: Random) -> None:
    """A float64 sum of n positive squares is off by at most n roundings."""
    x = random(size, dtype=dtype)
    found, expected = square_sum(x), x.double().square().sum()
    assert found.dtype == torch.float64
    assert (found - expected).abs() <= max(size, 1) * 2.0**-52 * expected


def test_where_there_is_no_float64_a_tree_adds_up(random: Random) -> None:
    """Without float64, a tree adds 8,192 squares in 13 steps; one more step per program adds the partial sums."""
    x, programs = random(5 * 8192, dtype=torch.float32), 5
    with mock.patch.object(operation, "square_dtype", return_value=torch.float32):
        found = square_sum(x)
    expected = x.double().square().sum()
    assert found.dtype == torch.float32
    assert (found.double() - expected).abs() <= (13 + 1 + programs) * 2.0**-23 * expected


def test_neither_the_largest_nor_the_smallest_squares_are_lost(device: torch.device) -> None:
    """Squares that fp32 cannot represent, large or small, are kept."""
    x = torch.tensor([1e30, 1e-30], device=device)
    assert square_sum(x[:1]) == x[0].double() ** 2
    assert square_sum(x[1:]) == x[1].double() ** 2


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_shows(bad: float, random: Random) -> None:
    x = random(5000, dtype=torch.float32)
    x[4321] = bad
    assert not square_sum(x).isfinite()
