"""SwiGLU (Shazeer 2020): silu(gate) * up, of the two halves of one projection.

Only the projection is saved; the activation is computed again in the backward pass.

Legend: T rows, I intermediate.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels import backend


def swiglu(z_T2I: Tensor) -> Tensor:
    """`z_T2I` [..., 2 I] holds gate then up; returns [..., I]."""
    if backend.use_triton(z_T2I):
        from optimus.kernels.triton import swiglu as kernels

        return kernels.swiglu(z_T2I)
    return _SwiGLU.apply(z_T2I)


def swiglu_reference(z_T2I: Tensor) -> Tensor:
    """The definition, for tests."""
    gate, up = z_T2I.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(h_grad_TI: Tensor, z_T2I: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of z [..., 2 I], the activation h [..., I] computed again)."""
    gate, up = z_T2I.chunk(2, -1)
    z_grad = torch.empty_like(z_T2I)
    gate_grad, up_grad = z_grad.chunk(2, -1)
    act = F.silu(gate)
    torch.mul(h_grad_TI, act, out=up_grad)
    torch.ops.aten.silu_backward.grad_input(h_grad_TI * up, gate, grad_input=gate_grad)
    return z_grad, act.mul_(up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_T2I: Tensor) -> Tensor:
        ctx.save_for_backward(z_T2I)
        gate, up = z_T2I.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return swiglu_backward(grads[0], *ctx.saved_tensors)[0]
