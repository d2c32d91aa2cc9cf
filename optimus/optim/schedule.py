"""The learning rate of a step: a linear warm-up from zero to the peak, then a row of `SCHEDULES`."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from optimus.errors import UserError, said
from optimus.plugins import Table

Cooldown = Literal["linear", "sqrt", "cosine"]


class RateError(UserError):
    """Raised when a plugin's schedule fails or returns an invalid learning rate.

    Training must end, because other ranks may wait for this rank.
    """


class LrSchedule(NamedTuple):
    """The parameters of a learning-rate schedule. The schedule wsd ends with a cooldown of `cooldown_steps` steps."""

    name: str
    peak: float
    minimum: float
    warmup_steps: int
    steps: int
    cooldown: Cooldown = "sqrt"
    cooldown_steps: int = 0
    options: Mapping[str, float] = {}  # parameters of a plugin's schedule


class LrRow(NamedTuple):
    """A learning-rate schedule. `rate` maps an `LrSchedule` and a step after the warm-up to the learning rate."""

    name: str
    rate: Callable[[LrSchedule, int], float]
    options: Mapping[str, float] = {}  # names and defaults of the parameters that the schedule adds


# Each function maps the elapsed fraction of a decay to (rate - minimum) / (peak - minimum). `linear` and `sqrt`: Hägele
# et al. 2024, section 3. `cosine`: SGDR, eq. 5.
COOLDOWNS: dict[Cooldown, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "sqrt": lambda share: 1 - math.sqrt(share),
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
}


def _fall(rule: LrSchedule, step: int, shape: Cooldown, first: int) -> float:
    """Returns the learning rate of `step`: the peak up to `first`, then a decay to the minimum at the last step."""
    share = min(1.0, max(0.0, (step - first) / max(1, rule.steps - first)))
    return rule.minimum + (rule.peak - rule.minimum) * COOLDOWNS[shape](share)


_OWN = [
    LrRow("cosine", lambda rule, step: _fall(rule, step, "cosine", rule.warmup_steps)),
    LrRow("constant", lambda rule, step: rule.peak),
    LrRow("linear", lambda rule, step: _fall(rule, step, "linear", rule.warmup_steps)),
    # Vaswani et al. 2017, section 5.3.
    LrRow(
        "inverse-sqrt", lambda rule, step: max(rule.minimum, rule.peak * math.sqrt(max(1, rule.warmup_steps) / step))
    ),
    # MiniCPM, section 4.
    LrRow("wsd", lambda rule, step: _fall(rule, step, rule.cooldown, rule.steps - rule.cooldown_steps)),
]
SCHEDULES = Table("learning-rate schedule", LrRow, lambda: {row.name: row for row in _OWN})


def learning_rate(rule: LrSchedule, step: int) -> float:
    """Returns the learning rate of `step`, which counts from 1.

    Raises `RateError` if the function `rate` of the schedule raises an exception, or does not return a finite number of
    at least 0.
    """
    if step <= rule.warmup_steps:
        return rule.peak * step / rule.warmup_steps
    try:
        found = SCHEDULES[rule.name].rate(rule, step)
    except (Exception, SystemExit) as error:  # the user's code
        raise RateError(
            f"the learning-rate schedule {rule.name} failed ({said(error)}): correct its function rate"
        ) from error
    if not isinstance(found, numbers.Real) or not 0 <= found < math.inf:
        value = " ".join(repr(found).split())
        raise RateError(f"the learning-rate schedule {rule.name} returns {value}: return a finite number of at least 0")
    return float(found)
