"""Rotary position embedding of strided inputs; see `kernels.rotary`.

Legend: B batch, S sequence, N heads, D head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ELEMENTS = 2048  # maximum number of pairs per program, unless one head has more


def turn(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor, sign: float) -> Tensor:
    """Returns `x_BSND` with every head rotated by `sign` times the angles of the token's position, computed in fp32.

    `cos_SD` and `sin_SD` have D/2 columns, one per pair. The result is contiguous.
    """
    B, S, N, D = x_BSND.shape
    y_BSND = torch.empty(x_BSND.shape, dtype=x_BSND.dtype, device=x_BSND.device)
    pairs = triton.next_power_of_2(D // 2)
    rows = max(1, _BLOCK_ELEMENTS // pairs)
    _rotate[(max(1, triton.cdiv(B * S * N, rows)),)](
        x_BSND, cos_SD.contiguous(), sin_SD.contiguous(), y_BSND, sign, *x_BSND.stride(), B * S * N, S,
        N=N, HALF=D // 2, ROWS=rows, PAIRS=pairs,
    )  # fmt: skip
    return y_BSND


@triton.jit(do_not_specialize=["heads", "S"])
def _rotate(
    x_BSND, cos_SD, sin_SD, y_BSND, sign, stride_b, stride_s, stride_n, stride_d, heads, S,
    N: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PAIRS)
    real = (row < heads)[:, None] & (d < HALF)[None, :]
    position = row // N % S
    x_at = x_BSND + (row // N // S * stride_b + position * stride_s + row % N * stride_n)[:, None]
    a = tl.load(x_at + (d * stride_d)[None, :], mask=real, other=0).to(tl.float32)
    b = tl.load(x_at + ((d + HALF) * stride_d)[None, :], mask=real, other=0).to(tl.float32)
    angle_at = position[:, None] * HALF + d[None, :]
    cos = tl.load(cos_SD + angle_at, mask=real, other=0)
    sin = tl.load(sin_SD + angle_at, mask=real, other=0) * sign
    y_at = y_BSND + row[:, None] * 2 * HALF + d[None, :]
    tl.store(y_at, (a * cos - b * sin).to(y_BSND.dtype.element_ty), mask=real)
    tl.store(y_at + HALF, (b * cos + a * sin).to(y_BSND.dtype.element_ty), mask=real)
