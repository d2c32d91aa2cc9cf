"""SwiGLU, one kernel per pass; see `kernels.activation`.

Legend: T rows, I intermediate, J = 2 I: gate, then up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.limits import LIMIT, SLOPE

_BLOCK = 1024  # maximum number of columns per program
_SLOPE, _LIMIT = tl.constexpr(SLOPE), tl.constexpr(LIMIT)


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
def swiglu_tile(gate, up, CLAMPED: tl.constexpr = False):
    """Returns silu(gate) * up, or the gated `clamped_silu` if `CLAMPED`. `gate` and `up` must be fp32."""
    if CLAMPED:
        gate, up = _clamped(gate, up)
        return gate * tl.sigmoid(gate * _SLOPE) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def swiglu_tile_backward(h_grad, gate, up, CLAMPED: tl.constexpr = False):
    """Returns (gradient of gate, gradient of up) of `swiglu_tile`."""
    if CLAMPED:
        g, u = _clamped(gate, up)
        s = tl.sigmoid(g * _SLOPE)
        gate_grad = tl.where(gate > _LIMIT, 0.0, h_grad * u * s * (1 + g * _SLOPE * (1 - s)))
        return gate_grad, tl.where(tl.abs(up) > _LIMIT, 0.0, h_grad * g * s)
    else:
        s = tl.sigmoid(gate)
        return h_grad * up * s * (1 + gate * (1 - s)), h_grad * gate * s


@triton.jit
def _clamped(gate, up):
    # Keeps NaN, which `tl.minimum` would drop.
    up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
    return tl.where(gate > _LIMIT, _LIMIT, gate), up + 1


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
