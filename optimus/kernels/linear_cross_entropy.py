"""Output layer and cross-entropy in one operation, a block of rows at a time.

The logits of a long sequence over a vocabulary of 50304 are the largest tensor of a training step. Here no more than one
block of rows exists at a time: its gradient is computed while it is there (the gradient of the mean loss does not depend on
what comes after), so the backward pass only scales what the forward pass has left.

Legend: T rows (tokens), H hidden, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.kernels import backend
from optimus.kernels.backend import compute_dtype
from optimus.kernels.matmul import matmul

_BLOCK_ELEMENTS = 1 << 21  # fp32 logits of one block: 8 MB, which stays in a CPU's cache


def linear_cross_entropy(x_TH: Tensor, w_VH: Tensor, target_T: Tensor) -> Tensor:
    """Mean over T of the cross-entropy of `x_TH @ w_VH.T` against `target_T`; an fp32 scalar.

    Softmax and loss are computed in fp32. Gradients flow to `x_TH` and `w_VH`.
    """
    if backend.use_triton(x_TH):
        from optimus.kernels.triton import linear_cross_entropy as kernels

        return kernels.linear_cross_entropy(x_TH, w_VH, target_T)
    return _LinearCrossEntropy.apply(x_TH, w_VH, target_T, torch.is_grad_enabled())


def linear_cross_entropy_reference(x_TH: Tensor, w_VH: Tensor, target_T: Tensor) -> Tensor:
    """The definition, for tests."""
    return F.cross_entropy(F.linear(x_TH, w_VH).to(compute_dtype(x_TH.dtype)), target_T)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w_VH: Tensor, target_T: Tensor, with_gradients: bool) -> Tensor:
        rows, wide = len(x_TH), compute_dtype(x_TH.dtype)
        block = max(1, _BLOCK_ELEMENTS // len(w_VH))
        total = torch.zeros((), dtype=wide, device=x_TH.device)
        x_grad = torch.empty_like(x_TH) if with_gradients else None
        w_grad = torch.zeros_like(w_VH, dtype=wide) if with_gradients else None
        for start in range(0, rows, block):
            x, target = x_TH[start : start + block], target_T[start : start + block, None]
            logits = matmul(x, w_VH.T)
            p = logits.softmax(-1, dtype=wide)
            total += _loss_sum(logits, p, target)
            if x_grad is not None and w_grad is not None:
                p.scatter_add_(1, target, torch.full_like(target, -1, dtype=p.dtype))
                logits_grad = p.div_(rows).to(x.dtype)
                matmul(logits_grad, w_VH, out=x_grad[start : start + block])
                matmul(logits_grad.T, x, out=w_grad, add=True)
        if x_grad is not None:
            ctx.save_for_backward(x_grad, w_grad)
            ctx.weight_dtype = w_VH.dtype
        return total / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_grad, w_grad = ctx.saved_tensors
        scale = grads[0]
        return x_grad * scale.to(x_grad.dtype), (w_grad * scale).to(ctx.weight_dtype), None, None


def _loss_sum(logits_TV: Tensor, p_TV: Tensor, target_T1: Tensor) -> Tensor:
    """Sum of the cross-entropies, from logits and their softmax.

    The normaliser comes from the largest probability: that of the target may be too small for fp32.
    """
    top_T1, best_T1 = p_TV.max(-1, keepdim=True)
    best, target = (logits_TV.gather(1, at).to(p_TV.dtype) for at in (best_T1, target_T1))
    return (best - top_T1.log() - target).sum()
