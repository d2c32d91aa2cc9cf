"""Sums of squares in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192  # elements per program


def square_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the squares of x, accumulated in `dtype`."""
    x = x.flatten()
    sum_B = x.new_empty(triton.cdiv(x.numel(), _BLOCK), dtype=dtype)
    if len(sum_B):
        _square_sum[(len(sum_B),)](x, sum_B, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return sum_B.sum()


@triton.jit
def _square_sum(x, sum_B, size, BLOCK: tl.constexpr):
    # The compiler specialises on sizes divisible by 16; for other sizes, the mask can make loads scalar.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < size, other=0).to(sum_B.dtype.element_ty)
    tl.store(sum_B + tl.program_id(0), tl.sum(value * value, axis=0))
