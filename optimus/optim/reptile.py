"""Reptile steps around an update rule (Nichol et al. 2018; Abbes et al. 2025, algorithm 1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from optimus.optim.rule import OptimizerStep, Tile, TilingName, UpdateRule, naming_rule


@dataclass(frozen=True, kw_only=True)
class Reptile(UpdateRule):
    """Applies `inner` at every update, and a Reptile step after every `every` updates.

    A Reptile step sets the weights to start + `share` * (weights - start). `start` are the weights after the previous
    Reptile step, or before the first update. The weight decay and the learning rate of `inner` apply.
    """

    inner: UpdateRule
    every: int
    share: float

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the inner rule's buffers, then of the buffer with the start weights."""
        return *self.inner.kinds, "reptile.start"

    @property
    def tiling(self) -> TilingName:  # type: ignore[override]
        """See `UpdateRule.tiling`."""
        return self.inner.tiling

    @property
    def counters(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `UpdateRule.counters`."""
        return self.inner.counters

    def count(self, counters: Mapping[str, float], step: int, lr: float) -> dict[str, float]:
        """See `UpdateRule.count`."""
        return self.inner.count(counters, step, lr)

    def begin(self, weight: Tensor, moments: Sequence[Tensor]) -> None:
        """Initialises the buffers of the inner rule, and copies `weight` to the last buffer."""
        self.inner.begin(weight, moments[:-1])
        moments[-1].copy_(weight)

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """See `UpdateRule.apply`."""
        *moments, start = tile.moments
        with naming_rule(self.inner):
            self.inner.apply(now, tile._replace(moments=moments))
        if now.step % self.every == 0:
            tile.weight.copy_(start.lerp_(tile.weight, self.share))
