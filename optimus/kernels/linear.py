"""A product with a weight matrix, whose gradient is added where it accumulates.

Legend: L inputs, N outputs, T rows (tokens).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels.matmul import matmul
from optimus.kernels.sink import Sink, add_gradient


def linear(x: Tensor, w_NL: Tensor, sink: Sink | None = None) -> Tensor:
    """[..., L] to [..., N]: x @ w.T. With a `sink`, the gradient of `w_NL` goes there and autograd is given none."""
    return _Linear.apply(x, w_NL, sink)


def linear_reference(x: Tensor, w_NL: Tensor) -> Tensor:
    """The definition, for tests."""
    return F.linear(x, w_NL)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NL: Tensor, sink: Sink | None) -> Tensor:
        ctx.save_for_backward(x, w_NL)
        ctx.sink = sink
        return matmul(_rows(x), w_NL.T).view(*x.shape[:-1], len(w_NL))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w_NL = ctx.saved_tensors
        y_grad_TN = _rows(grads[0])
        x_grad = matmul(y_grad_TN, w_NL).view_as(x) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return x_grad, None, None
        if ctx.sink is None:
            return x_grad, matmul(y_grad_TN.T, _rows(x)), None
        add_gradient(ctx.sink, lambda grad: matmul(y_grad_TN.T, _rows(x), out=grad.view(w_NL.shape), add=True))
        return x_grad, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
