"""Stochastic gradient descent with a momentum, and a learning rate that falls in steps."""

from dataclasses import dataclass
from typing import ClassVar

from optimus.extend import LrRow, LrSchedule, OptimizerStep, RuleRow, Tile, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Sgd(UpdateRule):
    """SGD with decoupled weight decay. The buffer of a parameter is the sum of its decayed gradients."""

    kinds: ClassVar[tuple[str, ...]] = ("sgd.momentum",)

    momentum: float = 0.9

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        (momentum,) = tile.moments
        momentum.mul_(self.momentum).add_(tile.gradient)
        tile.weight.mul_(1 - self.rate(now) * self.weight_decay).add_(momentum, alpha=-self.rate(now))


def _rate(schedule: LrSchedule, step: int) -> float:
    falls = (step - schedule.warmup_steps) // schedule.options["every"]
    return max(schedule.minimum, schedule.peak * schedule.options["factor"] ** falls)


SGD = RuleRow("sgd", Sgd)
STEP = LrRow("step", _rate, {"every": 1000, "factor": 0.5})
