"""SwiGLU, one kernel per pass; see `kernels.activation`.

Legend: T rows, I intermediate, J = 2 I: gate, then up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.triton.activation import silu, silu_backward

_BLOCK = 1024  # maximum number of columns per program


def swiglu(z_TJ: Tensor) -> Tensor:
    """Returns silu(gate) * up [..., I]; gate and up are the halves of the last dim."""
    h_TI = z_TJ.new_empty(*z_TJ.shape[:-1], z_TJ.shape[-1] // 2)
    if h_TI.numel():
        grid, sizes = _programs(h_TI)
        _swiglu[grid](z_TJ.contiguous(), h_TI, **sizes)
    return h_TI


def swiglu_backward(h_grad_TI: Tensor, z_TJ: Tensor) -> Tensor:
    """Returns the gradient of z, [..., 2 I]."""
    z_TJ, h_grad_TI = z_TJ.contiguous(), h_grad_TI.contiguous()
    z_grad_TJ = torch.empty_like(z_TJ)
    if h_grad_TI.numel():
        grid, sizes = _programs(h_grad_TI)
        _swiglu_backward[grid](h_grad_TI, z_TJ, z_grad_TJ, **sizes)
    return z_grad_TJ


def _programs(h_TI: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    I = h_TI.shape[-1]
    block = min(_BLOCK, triton.next_power_of_2(I))
    return (h_TI.numel() // I, triton.cdiv(I, block)), {"I": I, "BLOCK": block}


@triton.jit
def _swiglu(z_TJ, h_TI, I: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(z_TJ + row * 2 * I + i, mask=i < I, other=0).to(tl.float32)
    up = tl.load(z_TJ + row * 2 * I + I + i, mask=i < I, other=0).to(tl.float32)
    tl.store(h_TI + row * I + i, silu(gate, up).to(h_TI.dtype.element_ty), mask=i < I)


@triton.jit
def _swiglu_backward(h_grad_TI, z_TJ, z_grad_TJ, I: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(z_TJ + row * 2 * I + i, mask=i < I, other=0).to(tl.float32)
    up = tl.load(z_TJ + row * 2 * I + I + i, mask=i < I, other=0).to(tl.float32)
    h_grad = tl.load(h_grad_TI + row * I + i, mask=i < I, other=0).to(tl.float32)
    gate_grad, up_grad = silu_backward(h_grad, gate, up)
    out = z_grad_TJ + row * 2 * I + i
    tl.store(out, gate_grad.to(z_grad_TJ.dtype.element_ty), mask=i < I)
    tl.store(out + I, up_grad.to(z_grad_TJ.dtype.element_ty), mask=i < I)
