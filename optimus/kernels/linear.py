"""A matmul with a weight matrix. The weight gradient can accumulate in a gradient buffer.

Legend: L inputs, N outputs, T rows (tokens).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.matmul import matmul, wide_matmul
from optimus.step_context import StepContext


class MatrixProduct:
    """The matmuls of a projection: forward, input gradient and weight gradient. All matrices must be contiguous."""

    def __init__(self, step: StepContext | None = None) -> None:
        self._step = step or StepContext()

    def forward(self, x_TL: Tensor, w_NL: Tensor) -> Tensor:
        """Returns x @ w.T, [T, N]."""
        return matmul(x_TL, w_NL.T, forms=self._step.forms)

    def input_gradient(self, y_grad_TN: Tensor, w_NL: Tensor) -> Tensor:
        """Returns the gradient of x [T, L]."""
        return matmul(y_grad_TN, w_NL, forms=self._step.forms)

    def weight_gradient(
        self, y_grad_TN: Tensor, x_TL: Tensor, w_NL: Tensor, buffer: GradientBuffer | None
    ) -> Tensor | None:
        """Returns the gradient of w [N, L], or adds the gradient to `buffer` and returns None."""
        forms = self._step.forms
        if buffer is None:
            return wide_matmul(y_grad_TN.T, x_TL, forms)
        buffer.add(lambda grad: matmul(y_grad_TN.T, x_TL, out=grad.view(w_NL.shape), add=True, forms=forms))
        return None


class TransposedMatrixProduct(MatrixProduct):
    """A `MatrixProduct` with a weight of shape [L, N]."""

    def forward(self, x_TL: Tensor, w_LN: Tensor) -> Tensor:
        return matmul(x_TL, w_LN, forms=self._step.forms)

    def input_gradient(self, y_grad_TN: Tensor, w_LN: Tensor) -> Tensor:
        return matmul(y_grad_TN, w_LN.T, forms=self._step.forms)

    def weight_gradient(
        self, y_grad_TN: Tensor, x_TL: Tensor, w_LN: Tensor, buffer: GradientBuffer | None
    ) -> Tensor | None:
        return super().weight_gradient(x_TL, y_grad_TN, w_LN, buffer)


_PLAIN = MatrixProduct()


def linear(
    x: Tensor, w_NL: Tensor, buffer: GradientBuffer | None = None, product: MatrixProduct | None = None
) -> Tensor:
    """Computes x @ w.T, or `product.forward(x, w)`: [..., L] to [..., N].

    With a `buffer`, the gradient of `w_NL` accumulates in the buffer, and autograd gets None.
    """
    return _Linear.apply(x, w_NL, buffer, product or _PLAIN)


def linear_reference(x: Tensor, w_NL: Tensor) -> Tensor:
    """Reference implementation for tests."""
    return F.linear(x, w_NL)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NL: Tensor, buffer: GradientBuffer | None, product: MatrixProduct) -> Tensor:
        ctx.save_for_backward(x, w_NL)
        ctx.buffer, ctx.product = buffer, product
        y_TN = product.forward(_rows(x), w_NL)
        # A matrix x needs no view: autograd could forbid in-place operations on a view.
        return y_TN if x.ndim == 2 else y_TN.view(*x.shape[:-1], y_TN.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w_NL = ctx.saved_tensors
        y_grad_TN, product = _rows(grads[0]), ctx.product
        x_grad = product.input_gradient(y_grad_TN, w_NL).view_as(x) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return x_grad, None, None, None
        return x_grad, product.weight_gradient(y_grad_TN, _rows(x), w_NL, ctx.buffer), None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
