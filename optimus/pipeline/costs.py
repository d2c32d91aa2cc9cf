"""Models the cost of a pipeline's actions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from optimus.errors import UserError
from optimus.pipeline.schedule import VOCABULARY_ALGORITHMS, Action, Kind, Schedule

PerStage = float | Sequence[float]
T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Costs:
    """The times of actions, in one arbitrary unit.

    A cost of type `PerStage` is one number for all stages, or one number per stage. Raises `UserError` for a time,
    jitter or seed that is negative or not finite.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weights: PerStage = 1.0  # an unsplit backward pass takes `backward_input` + `backward_weights`
    logits: float = 0.0
    """Time of the logits of one vocabulary shard. `VocabularyAlgorithm` has the times of the passes in this unit."""
    link: float = 0.0
    """Time of a message between two ranks."""
    blocking: bool = False
    """True if a rank waits for its transfers; by default transfers overlap with computations."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a random factor. Each computation time has such a factor, lognormal with
    mean 1, except the times of vocabulary passes."""
    seed: int = 0
    """Seed of the jitter."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weights"):
            value = getattr(self, name)
            if not all(0 <= number < math.inf for number in (value if isinstance(value, Sequence) else [value])):
                raise UserError(f"pipeline costs: {name} is {value}; give no number below zero, and finite numbers")
        for name in ("logits", "link", "jitter", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(
                    f"pipeline costs: {name} is {getattr(self, name)}; give zero or more, and a finite number"
                )

    def durations(self, schedule: Schedule) -> Callable[[Action], float]:
        """Returns a function from a computation of `schedule` to its time."""
        stages, microbatches = schedule.stages, schedule.microbatches
        algorithm = schedule.vocabulary or VOCABULARY_ALGORITHMS[1]
        input_, weights = (per_stage(getattr(self, f"backward_{part}"), stages) for part in ("input", "weights"))
        times = {
            Kind.FORWARD: per_stage(self.forward, stages),
            Kind.BACKWARD_INPUT: input_,
            Kind.BACKWARD_WEIGHTS: weights,
            Kind.BACKWARD: [a + b for a, b in zip(input_, weights)],
            Kind.LOGITS: [algorithm.logits * self.logits] * stages,
            Kind.LOSS: [algorithm.loss * self.logits] * stages,
            Kind.EMBED: [0.0] * stages,
            Kind.EMBED_BACKWARD: [0.0] * stages,
        }
        if not self.jitter:
            return lambda action: times[action.kind][action.stage]
        import numpy as np

        sizes = 3, stages, microbatches
        draws = np.random.default_rng(self.seed).lognormal(-(self.jitter**2) / 2, self.jitter, sizes).tolist()
        row = {
            Kind.FORWARD: 0,
            Kind.BACKWARD: 1,
            Kind.BACKWARD_INPUT: 1,
            Kind.BACKWARD_WEIGHTS: 2,
        }

        def duration(action: Action) -> float:
            kind, stage, microbatch = action
            factor = float(draws[row[kind]][stage][microbatch]) if kind in row else 1.0
            return times[kind][stage] * factor

        return duration


def per_stage(value: T | Sequence[T], stages: int, what: str = "pipeline costs: {} numbers") -> list[T]:
    """Returns one number per stage: the number `value` for each stage, or the elements of the sequence `value`.

    Raises `UserError` when the sequence does not have one number per stage. `what`, formatted with the length of the
    sequence, begins the message.
    """
    numbers = list(value) if isinstance(value, Sequence) else [value] * stages
    if len(numbers) != stages:
        raise UserError(f"{what.format(len(numbers))} for {stages} stages; give one per stage, or one for all")
    return numbers
