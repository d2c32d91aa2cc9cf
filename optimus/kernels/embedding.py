"""Embedding look-up that accumulates the gradient of a 16-bit table in fp32.

Legend: T rows (tokens), V rows of the table, H hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels.backend import compute_dtype


def embedding(row_T: Tensor, w_VH: Tensor) -> Tensor:
    """Returns the rows [..., H] of the table at the indices `row_T` [...]."""
    if w_VH.dtype == compute_dtype(w_VH.dtype):
        return embedding_reference(row_T, w_VH)
    return _Embedding.apply(row_T, w_VH)


def embedding_reference(row_T: Tensor, w_VH: Tensor) -> Tensor:
    """Reference implementation, which `embedding` uses for tables in fp32 or float64."""
    return F.embedding(row_T, w_VH)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row_T: Tensor, w_VH: Tensor) -> Tensor:
        ctx.save_for_backward(row_T)
        ctx.rows = len(w_VH)
        return F.embedding(row_T, w_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (row_T,), (grad_TH,) = ctx.saved_tensors, grads
        wide = grad_TH.to(compute_dtype(grad_TH.dtype))
        return None, torch.ops.aten.embedding_dense_backward(wide, row_T, ctx.rows, -1, False)
