"""Reptile steps around any update rule (Nichol et al. 2018; for continued pretraining Abbes et al. 2025, algorithm 1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from optimus.optim.rule import OptimizerStep, Tile, TilingName, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Reptile(UpdateRule):
    """`inner`, and every so many updates back to a `share` of the way from where the last such step has ended.

    Keeps these weights beside what `inner` keeps, whose decay and rate are its own.
    """

    inner: UpdateRule
    every: int
    share: float

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the inner rule, and where the weights were."""
        return *self.inner.kinds, "reptile.start"

    @property
    def tiling(self) -> TilingName:  # type: ignore[override]
        """As the inner rule."""
        return self.inner.tiling

    def begin(self, weight: Tensor, kept: Sequence[Tensor]) -> None:
        """From these weights on."""
        self.inner.begin(weight, kept[:-1])
        kept[-1].copy_(weight)

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """As `UpdateRule.apply`."""
        *kept, start = tile.moments
        self.inner.apply(now, tile._replace(moments=kept))
        if now.step % self.every == 0:
            tile.weight.copy_(start.lerp_(tile.weight, self.share))
