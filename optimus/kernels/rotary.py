"""Rotary position embedding (RoFormer, eq. 34) of the pairs (x[i], x[i + D/2]), as in GPT-NeoX and OLMo.

Legend: B batch, S sequence, N heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels import backend


def rotary_table(
    positions_S: Tensor,
    head_size: int,
    theta: float,
    scaled: Callable[[Tensor], Tensor] = lambda frequencies_D: frequencies_D,
) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin), each fp32 [S, D/2], of the angles at integer `positions_S`. `scaled` maps the frequencies
    theta^(-2i/D) [D/2], in radians per position, to scaled frequencies."""
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions_S.device) / head_size
    angle_SD = positions_S.float()[:, None] * scaled(1.0 / theta**exponent)
    return angle_SD.cos(), angle_SD.sin()


def rotary(x_BSND: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates every head of `x_BSND` by the angles of `table`, the result of `rotary_table`.

    Computes in at least fp32. The result has the dtype of x.
    """
    return _Rotary.apply(x_BSND, *table)


def rotary_reference(x_BSND: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Reference implementation for tests, as a product of complex numbers."""
    real, imaginary = x_BSND.double().chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.complex(*(t.double()[:, None, :] for t in table))
    return torch.cat([turned.real, turned.imag], -1).to(x_BSND.dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SD, sin_SD)
        return _turn(x_BSND, cos_SD, sin_SD, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_SD, sin_SD = ctx.saved_tensors
        return _turn(grads[0], cos_SD, sin_SD, -1.0), None, None


def _turn(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor, sign: float) -> Tensor:
    if backend.use_triton(x_BSND):
        from optimus.kernels.triton import rotary as kernels

        return kernels.turn(x_BSND, cos_SD, sin_SD, sign)
    x = x_BSND.to(backend.compute_dtype(x_BSND.dtype))
    cos, sin = (t.to(x.dtype)[:, None, :] for t in (torch.cat([cos_SD, cos_SD], -1), sin_SD))
    y = x * cos
    (a, b), (a_out, b_out) = x.chunk(2, -1), y.chunk(2, -1)
    a_out.addcmul_(b, sin, value=-sign)
    b_out.addcmul_(a, sin, value=sign)
    return y.to(x_BSND.dtype)
