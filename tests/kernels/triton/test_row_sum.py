"""The kernel for sums of rows adds in order in fp32, for any number of rows, types and lengths."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus.kernels import row_sum
from optimus.kernels.row_sum import add_rows, add_rows_reference
from optimus.kernels.triton.row_sum import _ROWS

pytest.importorskip("triton")

Random = Callable[..., Tensor]


@pytest.mark.parametrize("size", [3 * 2048 + 17, 1, 0])
@pytest.mark.parametrize("count", [2, 5, _ROWS, _ROWS + 1, 3 * _ROWS])
def test_is_the_sum_in_order(count: int, size: int, dtype: torch.dtype, random: Random) -> None:
    """The order of additions is the reference's, so fp32 sums have the same bits. A sum of n numbers in fp32 is off by
    at most (n - 1) 2^-24 times the sum of their sizes, and by one rounding to the result's type."""
    rows = [random(size, dtype=dtype) for _ in range(count)]
    found, same = torch.full_like(rows[0], torch.nan), torch.empty_like(rows[0])
    add_rows(rows, found)
    add_rows_reference(rows, same)
    assert torch.equal(found, same)
    exact = torch.stack([row.double() for row in rows])
    bound = count * 2.0**-24 * exact.abs().sum(0) + torch.finfo(dtype).eps * exact.sum(0).abs()
    assert bool(((found.double() - exact.sum(0)).abs() <= bound).all())


@pytest.mark.parametrize("place", [0, 3, _ROWS + 2])
def test_the_result_may_be_a_row(place: int, dtype: torch.dtype, random: Random) -> None:
    rows = [random(5000, dtype=dtype) for _ in range(_ROWS + 3)]
    right = torch.empty_like(rows[0])
    add_rows_reference(rows, right)
    add_rows(rows, rows[place])
    assert torch.equal(rows[place], right)


def test_types_may_be_mixed(dtype: torch.dtype, random: Random) -> None:
    """A rank's own numbers are of another type than the partial sums of other ranks."""
    rows = [random(100, dtype=dtype), random(100, dtype=torch.float32), random(100, dtype=dtype)]
    found, right = torch.empty(2, 100, device=rows[0].device)
    add_rows(rows, found)
    add_rows_reference(rows, right)
    assert torch.equal(found, right)


def test_whole_numbers_are_added_as_they_are(device: torch.device) -> None:
    rows = [torch.tensor([2**53 + 1, -7], device=device), torch.tensor([2, 3], device=device)]
    add_rows(rows, found := torch.empty_like(rows[0]))
    assert found.tolist() == [2**53 + 3, -4]


def test_float64_needs_no_kernel(device: torch.device) -> None:
    rows = [torch.full((3,), 1 + 2.0**-40, dtype=torch.float64, device=device) for _ in range(2)]
    add_rows(rows, found := torch.empty_like(rows[0]))
    assert torch.equal(found, 2 * rows[0])
    assert row_sum.sum_dtype(torch.float64) == torch.float64
