"""Lion (Chen et al. 2023, algorithm 2) on flat tensors."""

from dataclasses import dataclass
from typing import ClassVar

from optimus.optim.rule import OptimizerStep, Tile, UpdateRule
from optimus.optim.rules import BETAS, RuleRow


@dataclass(frozen=True, kw_only=True)
class Lion(UpdateRule):
    """Lion with one buffer, the momentum m."""

    kinds: ClassVar[tuple[str, ...]] = ("lion.m",)

    beta1: float
    beta2: float

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """See `UpdateRule.apply`."""
        weight, gradient, (m,), *_ = tile
        sign = m.lerp(gradient, 1 - self.beta1).sign_()
        weight.mul_(1 - self.rate(now) * self.weight_decay).sub_(sign, alpha=self.rate(now))
        m.lerp_(gradient, 1 - self.beta2)


ROW = RuleRow("lion", Lion, BETAS)
