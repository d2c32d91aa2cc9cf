"""AdamW (Loshchilov and Hutter 2019, algorithm 2) on flat tensors."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimus.kernels import backend
from optimus.kernels.adamw import AdamWFactors, adamw_in_one_pass
from optimus.optim.rule import OptimizerStep, Tile, UpdateRule
from optimus.optim.rules import BETAS, RuleRow


@dataclass(frozen=True, kw_only=True)
class AdamW(UpdateRule):
    """AdamW with two buffers: the first moment m and the second moment v."""

    kinds: ClassVar[tuple[str, ...]] = ("adamw.m", "adamw.v")

    beta1: float
    beta2: float
    eps: float

    def update(self, now: OptimizerStep, tile: Tile) -> None:
        """See `UpdateRule.update`."""
        weight, gradient, (m, v), copy, _ = tile
        factors = self.beta1, self.beta2, self.eps, self.weight_decay
        if backend.use_triton(weight):
            from optimus.kernels.triton import adamw as kernels

            kernels.adamw(factors, now.step, self.rate(now), weight, gradient, m, v, now.gradient_scale, copy)
        # A tile on the host of a machine with an accelerator.
        elif weight.device.type == "cpu" and torch.accelerator.is_available():
            numbers = AdamWFactors.at_step(now.step, self.rate(now), *factors, now.gradient_scale)
            adamw_in_one_pass(weight, gradient, m, v, copy, numbers)
        else:
            super().update(now, tile)

    def in_place(self, weight: Tensor) -> bool:
        """See `UpdateRule.in_place`."""
        return backend.use_triton(weight)

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """See `UpdateRule.apply`."""
        weight, gradient, (m, v), *_ = tile
        steps = [torch.tensor(float(now.step), device=weight.device)]
        torch._fused_adamw_(
            [weight], [gradient], [m], [v], [], steps,
            lr=self.rate(now), beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=self.weight_decay,
            amsgrad=False, maximize=False,
        )  # fmt: skip


ROW = RuleRow("adamw", AdamW, BETAS | {"eps": "eps"})


def adamw_reference(rule: AdamW, step: int, lr: float, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
    """Applies the update of `AdamW.apply` in separate operations. Ignores `rule.lr_scale`."""
    weight.mul_(1 - lr * rule.weight_decay)
    m.lerp_(gradient, 1 - rule.beta1)
    v.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    denominator = v.sqrt().div_(math.sqrt(1 - rule.beta2**step)).add_(rule.eps)
    weight.addcdiv_(m, denominator, value=-lr / (1 - rule.beta1**step))
