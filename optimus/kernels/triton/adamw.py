"""AdamW (Loshchilov and Hutter 2019, algorithm 2) on flat tensors, in one pass over memory."""

import math

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements per program


def adamw(
    factors: tuple[float, float, float, float],
    step: int,
    lr: float,
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    gradient_scale: float,
    copy: Tensor | None,
) -> None:
    """Updates `weight`, `m` and `v` in place, and writes the new weights to `copy`, if given.

    `factors` are (beta1, beta2, eps, weight decay).
    """
    beta1, beta2, eps, weight_decay = factors
    # The host subtracts numbers near 1 in fp64: 1 - 0.999 in fp32 is wrong in the fifth digit.
    _adamw[(max(1, triton.cdiv(weight.numel(), _BLOCK)),)](
        weight, gradient, m, v, weight if copy is None else copy, weight.numel(),
        gradient_scale, 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps,
        lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), COPY=copy is not None, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit
def _adamw(
    weight, gradient, m, v, copy, size, gradient_scale, decay, one_minus_beta1, beta2, one_minus_beta2, eps,
    step_size, root_scale, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The compiler specialises on sizes divisible by 16; for other sizes, the mask can make loads scalar.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = i < size
    g = tl.load(gradient + i, mask=real, other=0).to(tl.float32) * gradient_scale
    m_new = tl.load(m + i, mask=real, other=0)
    m_new += (g - m_new) * one_minus_beta1
    v_new = tl.load(v + i, mask=real, other=0) * beta2 + g * g * one_minus_beta2
    w = tl.load(weight + i, mask=real, other=0) * decay
    w -= step_size * m_new / (tl.sqrt_rn(v_new) * root_scale + eps)
    tl.store(m + i, m_new, mask=real)
    tl.store(v + i, v_new, mask=real)
    tl.store(weight + i, w, mask=real)
    if COPY:
        tl.store(copy + i, w.to(copy.dtype.element_ty), mask=real)
