"""The record of a completed step, and the clock that times the step."""

import numbers
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from optimus.comm.recorder import Recorder
from optimus.errors import UserError
from optimus.training.step import StepResult


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a step on this rank."""

    total: float
    """Seconds until the end of the update, including the wait for data; hooks after the step do not count."""
    data: float
    """Seconds of `total` until all ranks have their data."""
    waited: float
    """Seconds of `total` spent waiting for collectives and messages."""
    by_kind: dict[str, float]
    """The seconds of `waited` after the wait for data, by kind of collective; all messages are one kind."""


@dataclass
class StepRecord:
    """The results of a completed step on the global batch, with this rank's times.

    Example:
        class Print(optimus.Hook):
            def after_step(self, trainer, record):
                print(record.step, record.result.loss, record.times.total)
    """

    step: int
    result: StepResult
    times: StepTimes
    values: dict[str, float] = field(default_factory=dict)
    """Numbers for the run's metrics, by name."""
    expert_load: dict[int, list[float]] = field(default_factory=dict)
    """The number of tokens of each expert relative to the layer's mean, by layer; empty in steps without a
    measurement."""
    samples: list[dict[str, str]] = field(default_factory=list)
    """The `prompt` and the continuation `text` of each of `evaluate.prompts`; empty in steps without continuations."""


_STEP = {"step", "tokens", "time", "lr", "grad_norm", "skipped_steps", "phase", "loss_scale", "overflow_steps"}
_LOSSES = {"loss", "balance_loss", "z_loss", "teacher_divergence", "bits_per_byte"}
_SPEED = {"tokens_per_second", "step_seconds", "data_seconds", "checkpoint_seconds", "model_flops_utilization"}
OWN_NAMES = _STEP | _LOSSES | _SPEED
"""Names of the library's metrics that do not begin as in `OWN_BEGINNINGS`."""
OWN_BEGINNINGS = ("tokens/", "train_loss/", "loss/", "bits_per_byte/", "tasks/", "time/", "memory/", "experts/")


def is_number(value: object) -> bool:
    """Returns True for a real number of Python or NumPy, and False for a tensor or an array."""
    return isinstance(value, numbers.Real)


def added_values(before: StepRecord, after: StepRecord) -> dict[str, float]:
    """Returns the values that a user's hook added to a record, as floats.

    Raises `UserError` for a value that is not a number or is beyond the largest float. Raises `UserError` for a name
    that is empty or not text, and for a name that the library or another hook uses. Raises `UserError` when the hook
    has changed other values or other fields of the record.
    """
    for each in fields(StepRecord):
        if each.name != "values" and getattr(after, each.name) != getattr(before, each.name):
            raise UserError(f"record.{each.name} does not belong to the hook: leave it unchanged")
    if not isinstance(after.values, Mapping):
        raise UserError(f"record.values is a {type(after.values).__name__}: it must map names to numbers")
    for name, value in before.values.items():
        if after.values.get(name) is not value:
            raise UserError(f"record.values[{name!r}] does not belong to the hook: choose another name")
    own: Mapping[Any, Any] = {name: value for name, value in after.values.items() if name not in before.values}
    found = dict[str, float]()
    for name, value in own.items():
        if not isinstance(name, str) or not name:
            raise UserError(f"record.values[{name!r}]: give a name, as text")
        if name in OWN_NAMES or name.startswith(OWN_BEGINNINGS):
            raise UserError(f"record.values[{name!r}] is a metric of the library: choose another name")
        if not is_number(value):
            raise UserError(
                f"record.values[{name!r}] is a {type(value).__name__}: give a number, for example by float()"
            )
        try:
            found[name] = float(value)
        except OverflowError:
            raise UserError(f"record.values[{name!r}] is beyond the largest float: give a smaller number") from None
    return found


class StepClock:
    """Times a step that begins at the construction of the clock."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._began = recorder, time.perf_counter()
        self._waited, self._by_kind = recorder.seconds, recorder.by_kind
        self._data = 0.0

    def data_is_there(self) -> None:
        """Marks the end of the wait for data."""
        self._data = time.perf_counter() - self._began
        self._by_kind = self._recorder.by_kind

    def times(self) -> StepTimes:
        """Returns the times since the construction of the clock."""
        recorder, before = self._recorder, self._by_kind
        since = {kind: seconds - before.get(kind, 0.0) for kind, seconds in recorder.by_kind.items()}
        total, waited = time.perf_counter() - self._began, recorder.seconds - self._waited
        return StepTimes(total, self._data, waited, {kind: seconds for kind, seconds in since.items() if seconds})
