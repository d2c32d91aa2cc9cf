"""AdamW on the host in one pass over memory, compiled by `torch.compile`.

If a first compilation on small tensors fails, the module warns and runs the same operations uncompiled.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AdamWFactors(NamedTuple):
    """The factors of one step, as fp32 scalar tensors so that new values cause no recompilation."""

    gradient_scale: Tensor
    decay: Tensor  # factor of the weights: 1 - learning rate * weight decay
    beta1: Tensor
    beta2: Tensor
    step_size: Tensor  # learning rate divided by the bias correction of the first moment
    correction: Tensor  # square root of the bias correction of the second moment
    eps: Tensor

    @classmethod
    def at_step(
        cls, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, gradient_scale: float
    ) -> "AdamWFactors":
        """Returns the factors of update `step`, counted from 1 (Loshchilov and Hutter 2019, algorithm 2)."""
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
    """Updates `weight`, `m` and `v` in place, and writes the new weights to `copy`, if given.

    `weight`, `m` and `v` must be flat fp32 tensors on the CPU. `copy` may alias `gradient`.
    """
    # If `copy` aliases the gradient, `_update` writes to a new tensor: an in-place loop is slower.
    same = copy is not None and copy.data_ptr() == gradient.data_ptr()
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
    made: Callable[..., Any] = torch.compile(_update, dynamic=True)
    try:
        few = [torch.zeros(64) for _ in range(4)]
        made(*few, torch.zeros(64, dtype=torch.bfloat16), *AdamWFactors.at_step(1, 0.0, 0.9, 0.95, 1e-8, 0.0, 1.0))
    except Exception as error:
        warnings.warn(f"AdamW on the host runs uncompiled, and slower: {error!r}"[:300], stacklevel=2)
        return None
    return made
