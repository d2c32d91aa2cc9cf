"""RMSNorm; see `kernels.rms_norm`.

Legend: T rows, H columns, B programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512  # maximum number of programs of the backward pass
_BLOCK_ELEMENTS = 4096


def rms_norm(x_TH: Tensor, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (normalised and scaled x, 1 / sqrt(mean(x^2) + eps) of each row); x and w must be contiguous."""
    T, H = x_TH.numel() // len(w_H), len(w_H)
    y_TH, r_T = torch.empty_like(x_TH), x_TH.new_empty(T, dtype=torch.float32)
    rows, blocks = _blocks(T, H)
    _rms_norm[(blocks,)](x_TH, w_H, y_TH, r_T, eps, T, H=H, ROWS=rows, COLUMNS=triton.next_power_of_2(H))
    return y_TH, r_T


def rms_norm_backward(
    y_grad_TH: Tensor, x_TH: Tensor, w_H: Tensor, r_T: Tensor, weight_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Returns (gradient of x, fp32 gradient of w). Without `weight_gradient`, the gradient of w is None.

    All tensors must be contiguous.
    """
    T, H = len(r_T), len(w_H)
    rows, blocks = _blocks(T, H)
    programs = min(blocks, _PROGRAMS)
    x_grad_TH, w_grad_BH = torch.empty_like(x_TH), x_TH.new_empty(programs, H, dtype=torch.float32)
    _rms_norm_backward[(programs,)](
        y_grad_TH, x_TH, w_H, r_T, x_grad_TH, w_grad_BH, T, programs, H=H, ROWS=rows,
        COLUMNS=triton.next_power_of_2(H),
    )  # fmt: skip
    return x_grad_TH, w_grad_BH.sum(0) if weight_gradient else None


def _blocks(T: int, H: int) -> tuple[int, int]:
    rows = max(1, min(32, _BLOCK_ELEMENTS // triton.next_power_of_2(H)))
    return rows, max(1, triton.cdiv(T, rows))


@triton.jit(do_not_specialize=["T"])
def _rms_norm(x_TH, w_H, y_TH, r_T, eps, T, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, COLUMNS)
    real = (t < T)[:, None] & (h < H)[None, :]
    x = tl.load(x_TH + t[:, None] * H + h[None, :], mask=real, other=0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)
    w = tl.load(w_H + h, mask=h < H, other=0).to(tl.float32)
    # Rounds the normalised value before scaling, as the reference does.
    n = (x * r[:, None]).to(y_TH.dtype.element_ty).to(tl.float32)
    tl.store(y_TH + t[:, None] * H + h[None, :], (n * w[None, :]).to(y_TH.dtype.element_ty), mask=real)
    tl.store(r_T + t, r, mask=t < T)


@triton.jit(do_not_specialize=["T", "programs"])
def _rms_norm_backward(
    y_grad_TH, x_TH, w_H, r_T, x_grad_TH, w_grad_BH, T, programs,
    H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, COLUMNS)
    w = tl.load(w_H + h, mask=h < H, other=0).to(tl.float32)
    w_grad = tl.zeros((COLUMNS,), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(T, ROWS), programs):
        t = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        real = (t < T)[:, None] & (h < H)[None, :]
        at = t[:, None] * H + h[None, :]
        g = tl.load(y_grad_TH + at, mask=real, other=0).to(tl.float32)
        r = tl.load(r_T + t, mask=t < T, other=0)[:, None]
        n = tl.load(x_TH + at, mask=real, other=0).to(tl.float32) * r
        w_grad += tl.sum(g * n, axis=0)
        g *= w[None, :]
        x_grad = (g - n * (tl.sum(g * n, axis=1) / H)[:, None]) * r
        tl.store(x_grad_TH + at, x_grad.to(x_grad_TH.dtype.element_ty), mask=real)
    tl.store(w_grad_BH + tl.program_id(0) * H + h, w_grad, mask=h < H)
