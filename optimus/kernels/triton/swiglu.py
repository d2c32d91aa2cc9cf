"""SwiGLU in one pass each way; see `kernels.activation`. The experts' kernels use its arithmetic on their tiles.

Legend: T rows, I intermediate, J = 2 I: gate, then up.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus.autograd import once_differentiable

_BLOCK = 1024  # columns of a program


def swiglu(z_TJ: Tensor) -> Tensor:
    """silu(gate) * up of the halves of the last dim; [..., I]. Only z is saved for the backward pass."""
    return _SwiGLU.apply(z_TJ)


@triton.jit
def swiglu_tile(gate, up):
    """silu(gate) * up, in fp32."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def swiglu_tile_backward(h_grad, gate, up):
    """(gradient of gate, gradient of up), in fp32."""
    s = tl.sigmoid(gate)
    return h_grad * up * s * (1 + gate * (1 - s)), h_grad * gate * s


@triton.jit
def _swiglu(z_TJ, h_TI, I: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(z_TJ + row * 2 * I + i, mask=i < I, other=0).to(tl.float32)
    up = tl.load(z_TJ + row * 2 * I + I + i, mask=i < I, other=0).to(tl.float32)
    tl.store(h_TI + row * I + i, swiglu_tile(gate, up).to(h_TI.dtype.element_ty), mask=i < I)


@triton.jit
def _swiglu_backward(h_grad_TI, z_TJ, z_grad_TJ, I: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(z_TJ + row * 2 * I + i, mask=i < I, other=0).to(tl.float32)
    up = tl.load(z_TJ + row * 2 * I + I + i, mask=i < I, other=0).to(tl.float32)
    h_grad = tl.load(h_grad_TI + row * I + i, mask=i < I, other=0).to(tl.float32)
    gate_grad, up_grad = swiglu_tile_backward(h_grad, gate, up)
    out = z_grad_TJ + row * 2 * I + i
    tl.store(out, gate_grad.to(z_grad_TJ.dtype.element_ty), mask=i < I)
    tl.store(out + I, up_grad.to(z_grad_TJ.dtype.element_ty), mask=i < I)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_TJ: Tensor) -> Tensor:
        z_TJ = z_TJ.contiguous()
        ctx.save_for_backward(z_TJ)
        I = z_TJ.shape[-1] // 2
        h_TI = z_TJ.new_empty(*z_TJ.shape[:-1], I)
        if h_TI.numel():
            block = min(_BLOCK, triton.next_power_of_2(I))
            _swiglu[(h_TI.numel() // I, triton.cdiv(I, block))](z_TJ, h_TI, I=I, BLOCK=block)
        return h_TI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (z_TJ,) = ctx.saved_tensors
        h_grad_TI = grads[0].contiguous()
        I = z_TJ.shape[-1] // 2
        z_grad_TJ = torch.empty_like(z_TJ)
        if h_grad_TI.numel():
            block = min(_BLOCK, triton.next_power_of_2(I))
            grid = (h_grad_TI.numel() // I, triton.cdiv(I, block))
            _swiglu_backward[grid](h_grad_TI, z_TJ, z_grad_TJ, I=I, BLOCK=block)
        return z_grad_TJ
