"""The rotary kernel equals a product of complex numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus.kernels.rotary import rotary, rotary_reference, rotary_table

pytest.importorskip("triton")

Random = Callable[..., Tensor]


@pytest.mark.parametrize("shape", [(2, 11, 3, 32), (1, 70, 5, 12), (3, 1, 1, 2), (0, 4, 2, 8)])
def test_equals_the_definition(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    random: Random,
    same_function: Callable[..., None],
) -> None:
    table = rotary_table(torch.arange(5, 5 + shape[1], device=device), shape[3], 10_000.0)
    same_function(rotary, rotary_reference, [random(*shape, dtype=dtype)], table)


def test_reads_views_of_a_projection(device: torch.device, random: Random) -> None:
    """Strided views are read correctly: queries inside a longer row, and attention's gradients with heads before
    positions."""
    table = rotary_table(torch.arange(6, device=device), 8, 10_000.0)
    q = random(2, 6, 3, 4, 8, dtype=torch.float32)[:, :, 1]
    assert rotary(q, table).equal(rotary(q.contiguous(), table))
    q = random(2, 4, 6, 8, dtype=torch.float32).transpose(1, 2)
    assert rotary(q, table).equal(rotary(q.contiguous(), table))
