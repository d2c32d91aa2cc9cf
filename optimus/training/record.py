"""Record of a completed step."""

import time
from dataclasses import dataclass, field

from optimus.comm.recorder import Recorder
from optimus.training.step import StepResult


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step on this rank."""

    whole: float
    """Waiting for data included."""
    data: float
    """Of them, waiting for data."""
    waited: float
    """Of them, in collectives, waiting for other ranks."""
    by_kind: dict[str, float]
    """The same by kind of collective."""


@dataclass
class StepRecord:
    """A completed step, of the global batch. Hooks add to it what they have measured."""

    step: int
    result: StepResult
    times: StepTimes
    values: dict[str, float] = field(default_factory=dict)
    """By name, for the run's metrics."""
    expert_load: dict[int, list[float]] | None = None
    """By layer: tokens of each expert, to the mean."""


class StepClock:
    """Times a step from its making on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._began = recorder, time.perf_counter()
        self._waited, self._by_kind = recorder.seconds, dict(recorder.by_kind)
        self._data = 0.0

    def data_is_there(self) -> None:
        """All so far was waiting for data."""
        self._data = time.perf_counter() - self._began

    def times(self) -> StepTimes:
        """The seconds until now."""
        recorder, before = self._recorder, self._by_kind
        since = {kind: seconds - before.get(kind, 0.0) for kind, seconds in recorder.by_kind.items()}
        whole, waited = time.perf_counter() - self._began, recorder.seconds - self._waited
        return StepTimes(whole, self._data, waited, {kind: seconds for kind, seconds in since.items() if seconds})
