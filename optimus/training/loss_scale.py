"""Scales the loss for training in float16 (Micikevicius et al. 2018, section 3.2; `torch.amp.GradScaler`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optimus.config import RunConfig
from optimus.config.tree import LossScaleConfig

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss in the backward pass of the next step."""

    value: float
    finite_steps: int = 0
    """The number of consecutive steps with finite gradients since the latest change of the scale."""

    def after(self, overflowed: bool, options: LossScaleConfig) -> "LossScale":
        """Returns the scale after a step whose gradients are not finite (`overflowed`), or are finite.

        The scale grows by `growth_factor` after `growth_interval` consecutive finite steps, unless the result is beyond
        the range of fp32, and falls by `backoff_factor`, at most to `minimum`, after an overflow.
        """
        if overflowed:
            return LossScale(max(options.minimum, self.value * options.backoff_factor))
        finite_steps, grown = self.finite_steps + 1, self.value * options.growth_factor
        if finite_steps < options.growth_interval:
            return LossScale(self.value, finite_steps)
        return LossScale(grown if grown <= _LARGEST else self.value)


def first_loss_scale(config: RunConfig, saved: Mapping[str, Any] | None = None) -> LossScale | None:
    """Returns the scale at a run's start, or None if the precision of the run needs no loss scaling.

    `saved` is the progress in the checkpoint that the run continues, if any; without a scale in it, the scale is
    `train.loss_scale.initial`.
    """
    if config.train.precision != "float16":
        return None
    options, value = config.train.loss_scale, (saved or {}).get("loss_scale")
    if saved is None or value is None or not math.isfinite(value):
        return LossScale(options.initial)
    return LossScale(max(options.minimum, value), saved.get("finite_steps", 0))
