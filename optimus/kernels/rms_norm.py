"""RMSNorm: y = w * x / sqrt(mean(x^2) + eps), where the mean and the quotient are in fp32 (float64 for float64).

Legend: T rows, H columns.
"""

from typing import Any

import torch
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels import backend
from optimus.kernels.backend import compute_dtype


def rms_norm(x_TH: Tensor, w_H: Tensor | None, eps: float) -> Tensor:
    """Normalises the last dim of `x_TH` (any leading dims) and scales by `w_H`, if given. Keeps x's dtype."""
    return _RmsNorm.apply(x_TH, x_TH.new_ones(x_TH.shape[-1]) if w_H is None else w_H, eps)


def rms_norm_reference(x_TH: Tensor, w_H: Tensor, eps: float) -> Tensor:
    """Reference implementation for tests."""
    x = x_TH.to(compute_dtype(x_TH.dtype))
    return w_H * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(x_TH.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w_H: Tensor, eps: float) -> Tensor:
        if backend.use_triton(x_TH):
            from optimus.kernels.triton import rms_norm as kernels

            y_TH, r = kernels.rms_norm(x_TH.contiguous(), w_H, eps)
        else:
            x = x_TH.to(compute_dtype(x_TH.dtype))
            r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            y_TH = (x * r).to(x_TH.dtype).mul_(w_H)
        # Saves x itself: a contiguous copy of a view would take more memory.
        ctx.save_for_backward(x_TH, w_H, r)
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (g_TH,) = grads
        x_TH, w_H, r_T1 = ctx.saved_tensors
        if backend.use_triton(x_TH):
            from optimus.kernels.triton import rms_norm as kernels

            given = g_TH.contiguous(), x_TH.contiguous(), w_H, r_T1, ctx.needs_input_grad[1]
            return *kernels.rms_norm_backward(*given), None
        n_TH = x_TH.to(r_T1.dtype) * r_T1
        g = g_TH.to(r_T1.dtype)
        w_grad = (g * n_TH).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        g = g * w_H
        dot_T1 = (g * n_TH).mean(-1, keepdim=True)
        x_grad = g.sub_(n_TH.mul_(dot_T1)).mul_(r_T1)
        return x_grad.to(x_TH.dtype), w_grad, None
