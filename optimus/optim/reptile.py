"""Reptile steps around an update rule without averages (Nichol et al. 2018).

For Reptile in continued pretraining, see Abbes et al. 2025, algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from optimus.optim.rule import OptimizerStep, Tile, TilingName, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Reptile(UpdateRule):
    """Applies `inner` at every update, and a Reptile step after every `every` updates.

    A Reptile step moves the weights towards the weights after the previous Reptile step, or at first towards the
    weights before the first update. The new weights lie at the fraction `share` of the way from these earlier weights
    to the current weights. The rule stores the earlier weights in addition to the buffers of `inner`. The weight decay
    and the learning rate of `inner` apply.
    """

    inner: UpdateRule
    every: int
    share: float

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the inner rule's buffers and of the buffer for the weights after the previous Reptile step."""
        return *self.inner.kinds, "reptile.start"

    @property
    def tiling(self) -> TilingName:  # type: ignore[override]
        """The tiling of the inner rule."""
        return self.inner.tiling

    @property
    def counters(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the inner rule's counters."""
        return self.inner.counters

    def count(self, counters: Mapping[str, float], step: int, lr: float) -> dict[str, float]:
        """Returns the counters of the inner rule."""
        return self.inner.count(counters, step, lr)

    def begin(self, weight: Tensor, moments: Sequence[Tensor]) -> None:
        """Initialises the buffers of the inner rule, and stores `weight` for the first Reptile step."""
        self.inner.begin(weight, moments[:-1])
        moments[-1].copy_(weight)

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """See `UpdateRule.apply`."""
        *moments, start = tile.moments
        self.inner.apply(now, tile._replace(moments=moments))
        if now.step % self.every == 0:
            tile.weight.copy_(start.lerp_(tile.weight, self.share))
