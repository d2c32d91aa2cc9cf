"""The learning rate as a pure function of the step: a linear warm-up from zero to the peak, then a row of `SCHEDULES`."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

Name = Literal["cosine", "constant", "linear", "inverse-sqrt", "wsd"]
Cooldown = Literal["linear", "sqrt", "cosine"]


class Schedule(NamedTuple):
    """What a learning rate follows from. Steps count from 1; of `steps`, the last `cooldown_steps` are the cooldown."""

    name: Name
    peak: float
    minimum: float
    warmup_steps: int
    steps: int
    cooldown: Cooldown = "sqrt"
    cooldown_steps: int = 0


def _share(step: int, first: int, last: int) -> float:
    """How much of the way from step `first` to step `last` lies behind."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


# From a share of the way to a share of the fall: linear and 1 - sqrt (Hägele et al. 2024, section 3), cosine (SGDR, eq. 5).
COOLDOWNS: dict[Cooldown, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "sqrt": lambda share: 1 - math.sqrt(share),
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
}


def _inverse_sqrt(rule: Schedule, step: int) -> float:
    """Of the step, from the peak at the end of the warm-up (Vaswani et al. 2017, section 5.3)."""
    return max(rule.minimum, rule.peak * math.sqrt(max(1, rule.warmup_steps) / step))


def _falls(shape: Cooldown) -> Callable[[Schedule, int], float]:
    def rate(rule: Schedule, step: int) -> float:
        left = COOLDOWNS[shape](_share(step, rule.warmup_steps, rule.steps))
        return rule.minimum + (rule.peak - rule.minimum) * left

    return rate


def _wsd(rule: Schedule, step: int) -> float:
    """Constant until the cooldown (MiniCPM, section 4)."""
    left = COOLDOWNS[rule.cooldown](_share(step, rule.steps - rule.cooldown_steps, rule.steps))
    return rule.minimum + (rule.peak - rule.minimum) * left


# After the warm-up.
SCHEDULES: dict[Name, Callable[[Schedule, int], float]] = {
    "constant": lambda rule, _: rule.peak,
    "cosine": _falls("cosine"),
    "linear": _falls("linear"),
    "inverse-sqrt": _inverse_sqrt,
    "wsd": _wsd,
}


def learning_rate(rule: Schedule, step: int) -> float:
    """Learning rate of `step`, which counts from 1 to `rule.steps`."""
    if step <= rule.warmup_steps:
        return rule.peak * step / rule.warmup_steps
    return SCHEDULES[rule.name](rule, step)
