"""AdamW on the host in one pass over memory: 28 bytes per element with gradients and copy in bf16.

The fused kernel of torch runs at memory speed, but gradients must be fp32 and scaled before it, and the copy be made after
it: twice the bytes. Here `torch.compile` makes one loop of all of it. Where it cannot, as without a compiler of C++, the
reference says so once and does the same arithmetic.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AdamWFactors(NamedTuple):
    """Numbers of one step, fp32 scalars: as tensors, or each step would be compiled anew."""

    gradient_scale: Tensor
    decay: Tensor  # what weights are multiplied by
    beta1: Tensor
    beta2: Tensor
    step_size: Tensor  # learning rate over the correction of the first moment
    correction: Tensor  # root of the correction of the second
    eps: Tensor

    @classmethod
    def of(
        cls, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, gradient_scale: float
    ) -> "AdamWFactors":
        """Of update `step`, which counts from 1 (Loshchilov and Hutter 2019, algorithm 2)."""
        numbers = (
            gradient_scale,
            1 - lr * weight_decay,
            beta1,
            beta2,
            lr / (1 - beta1**step),
            math.sqrt(1 - beta2**step),
            eps,
        )
        return cls(*map(torch.tensor, numbers))


def adamw_in_one_pass(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, factors: AdamWFactors
) -> None:
    """Update fp32 `weight`, `m` and `v`, flat on the CPU, in place, and fill `copy`, which may be the gradient's memory."""
    same = copy is not None and copy.data_ptr() == gradient.data_ptr()  # then a loop that reads and writes it is slower
    made = torch.empty_like(gradient) if same else copy
    (_compiled() or _update)(weight, gradient, m, v, made, *factors)
    if same and made is not None:
        gradient.copy_(made)


def _update(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    copy: Tensor | None,
    scale: Tensor,
    decay: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    step_size: Tensor,
    correction: Tensor,
    eps: Tensor,
) -> None:
    scaled = gradient.float() * scale
    m_new = m * beta1 + scaled * (1 - beta1)
    v_new = v * beta2 + scaled * scaled * (1 - beta2)
    updated = weight * decay - step_size * m_new / (v_new.sqrt() / correction + eps)
    m.copy_(m_new)
    v.copy_(v_new)
    weight.copy_(updated)
    if copy is not None:
        copy.copy_(updated)


@cache
def _compiled() -> Callable[..., Any] | None:
    """`_update` as one loop, or nothing where it cannot be compiled."""
    made: Callable[..., Any] = torch.compile(_update, dynamic=True)
    try:
        few = [torch.zeros(64) for _ in range(4)]
        made(*few, torch.zeros(64, dtype=torch.bfloat16), *AdamWFactors.of(1, 0.0, 0.9, 0.95, 1e-8, 0.0, 1.0))
    except Exception as error:
        warnings.warn(f"AdamW on the host is not compiled, and slower: {error!r}"[:300], stacklevel=2)
        return None
    return made
