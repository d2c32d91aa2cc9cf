"""Schedule-free AdamW (Defazio et al. 2024, algorithm 1) on flat tensors.

The weights are x, an average of the iterates z; gradients are those at y, between the two. It is meant for a constant
learning rate after a warm-up. Others are allowed, as the average is weighted by the squares of the rates: one that decays
gives late iterates less weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimus.optim.rule import OptimizerStep, Tile, UpdateRule


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(UpdateRule):
    """Keeps the iterate z and the second moment v."""

    kinds: ClassVar[tuple[str, ...]] = ("schedule_free.z", "schedule_free.v")
    averages: ClassVar[bool] = True
    counters: ClassVar[tuple[str, ...]] = ("weight_sum",)

    beta1: float
    beta2: float
    eps: float

    def begin(self, weight: Tensor, kept: Sequence[Tensor]) -> None:
        """z is the weights, v zero."""
        z, v = kept
        z.copy_(weight)
        v.zero_()

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """As `UpdateRule.apply`."""
        weight, gradient, (z, v), *_ = tile
        lr = self._corrected(now.step, self.rate(now))
        v.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        temporary = z.lerp(weight, self.beta1)
        z.sub_(temporary, alpha=lr * self.weight_decay)
        z.addcdiv_(gradient, torch.sqrt(v, out=temporary).add_(self.eps), value=-lr)
        weight.lerp_(z, self._average_weight(now))

    def computed(self, weight: Tensor, kept: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with y."""
        out.copy_(kept[0].lerp(weight, self.beta1))

    def count(self, counters: Mapping[str, float], step: int, lr: float) -> dict[str, float]:
        """The sum of the weights of all steps in the average: the squares of their learning rates, corrected as the second
        moment is biased."""
        return {"weight_sum": counters["weight_sum"] + self._corrected(step, lr) ** 2}

    def _average_weight(self, now: OptimizerStep) -> float:
        """The algorithm's c: the step's share of all weights."""
        weight = self._corrected(now.step, now.lr) ** 2
        return weight / now.counters["weight_sum"] if weight else 0.0

    def _corrected(self, step: int, lr: float) -> float:
        return lr * (1 - self.beta2**step) ** 0.5
