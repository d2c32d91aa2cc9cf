"""Schedule-free AdamW (Defazio et al. 2024, algorithm 1) on flat tensors.

The weights are x, an average of the iterates z. Training computes gradients at y, between x and z.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimus.optim.rule import OptimizerStep, Tile, UpdateRule
from optimus.optim.rules import BETAS, RuleRow


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(UpdateRule):
    """Schedule-free AdamW with two buffers: the iterate z and the second moment v."""

    kinds: ClassVar[tuple[str, ...]] = ("schedule_free.z", "schedule_free.v")
    averages: ClassVar[bool] = True
    counters: ClassVar[tuple[str, ...]] = ("weight_sum",)

    beta1: float
    beta2: float
    eps: float

    def begin(self, weight: Tensor, moments: Sequence[Tensor]) -> None:
        """Sets z to the weights and v to zero."""
        z, v = moments
        z.copy_(weight)
        v.zero_()

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """See `UpdateRule.apply`."""
        weight, gradient, (z, v), *_ = tile
        lr = self._corrected(now.step, self.rate(now))
        v.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        temporary = z.lerp(weight, self.beta1)
        z.sub_(temporary, alpha=lr * self.weight_decay)
        z.addcdiv_(gradient, torch.sqrt(v, out=temporary).add_(self.eps), value=-lr)
        weight.lerp_(z, self._average_weight(now))

    def computed(self, weight: Tensor, moments: Sequence[Tensor], out: Tensor) -> None:
        """Fills `out` with y."""
        out.copy_(moments[0].lerp(weight, self.beta1))

    def count(self, counters: Mapping[str, float], step: int, lr: float) -> dict[str, float]:
        """Returns `weight_sum`: the sum of the squared, bias-corrected learning rates up to `step`."""
        return {"weight_sum": counters["weight_sum"] + self._corrected(step, lr) ** 2}

    def _average_weight(self, now: OptimizerStep) -> float:
        """Returns the algorithm's c: this step's squared, bias-corrected learning rate divided by `weight_sum`.

        Returns 0 for a learning rate of 0.
        """
        weight = self._corrected(now.step, now.lr) ** 2
        return weight / now.counters["weight_sum"] if weight else 0.0

    def _corrected(self, step: int, lr: float) -> float:
        return lr * (1 - self.beta2**step) ** 0.5


ROW = RuleRow("schedule-free", ScheduleFree, BETAS | {"eps": "eps"})
