"""Lion (Chen et al. 2023, algorithm 2) on flat tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from optimus.optim.rule import Now, Rule, Whole, as_they_are, scaled


@dataclass(frozen=True, kw_only=True)
class Lion(Rule):
    """Keeps the momentum m. Its updates are signs: it takes a lower learning rate than AdamW and a higher decay."""

    kinds: ClassVar[tuple[str, ...]] = ("lion.m",)

    beta1: float = 0.9
    beta2: float = 0.99

    def update(
        self,
        now: Now,
        weight: Tensor,
        gradient: Tensor,
        kept: Sequence[Tensor],
        copy: Tensor | None = None,
        whole: Whole = as_they_are,
    ) -> None:
        """As `Rule.update`."""
        (m,) = kept
        gradient = scaled(gradient, now.gradient_scale)
        sign = m.lerp(gradient, 1 - self.beta1).sign_()
        weight.mul_(1 - now.lr * self.weight_decay).sub_(sign, alpha=now.lr)
        m.lerp_(gradient, 1 - self.beta2)
        if copy is not None:
            copy.copy_(weight)
