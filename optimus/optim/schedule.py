"""The learning rate as a pure function of the step."""

import math


def learning_rate(step: int, *, name: str, peak: float, minimum: float, warmup_steps: int, steps: int) -> float:
    """Learning rate of `step`, which counts from 1 to `steps`.

    Linear from zero to `peak` over the warm-up; then `cosine` falls to `minimum` at the last step (SGDR, eq. 5, one cycle)
    and `constant` stays at the peak.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if name == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))
