"""AdamW (Loshchilov and Hutter 2019, algorithm 2) on flat tensors."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.kernels import backend


class AdamW(NamedTuple):
    """Hyperparameters that do not change during a run."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adamw(
    rule: AdamW,
    step: int,
    lr: float,
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    gradient_scale: float = 1.0,
    copy: Tensor | None = None,
) -> None:
    """Update flat fp32 `weight`, first moment `m` and second moment `v` in place; `step` counts from 1.

    `gradient`, of any floating type, is multiplied by `gradient_scale`. `copy`, if given, gets the new weight in its type.
    """
    if backend.use_triton(weight):
        from optimus.kernels.triton import adamw as kernels

        kernels.adamw(rule, step, lr, weight, gradient, m, v, gradient_scale, copy)
        return
    if gradient_scale != 1.0 or gradient.dtype != torch.float32:
        gradient = gradient.to(torch.float32, copy=True).mul_(gradient_scale)
    steps = [torch.tensor(float(step), device=weight.device)]
    options: dict[str, Any] = {"lr": lr, "amsgrad": False, "maximize": False} | rule._asdict()
    torch._fused_adamw_([weight], [gradient], [m], [v], [], steps, **options)
    if copy is not None:
        copy.copy_(weight)


def adamw_reference(rule: AdamW, step: int, lr: float, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
    """The same update, line by line, for tests."""
    weight.mul_(1 - lr * rule.weight_decay)
    m.lerp_(gradient, 1 - rule.beta1)
    v.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    denominator = v.sqrt().div_(math.sqrt(1 - rule.beta2**step)).add_(rule.eps)
    weight.addcdiv_(m, denominator, value=-lr / (1 - rule.beta1**step))
