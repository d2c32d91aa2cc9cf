"""A hook that reports recovery from a failure."""

import time

from optimus.resilience.events import EventLog
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class Recovered(Hook):
    """Records the run's recovery from failures, if any, in the event log after the first step of this process."""

    order = Order.RECORD
    ranks = "first"

    def before_training(self, trainer: Trainer) -> None:
        self._events = EventLog(trainer.folder)
        self._failures = self._events.unrecovered()

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if self._failures:
            first = self._failures[0]  # the event's time is `seconds` after the failure
            seconds = time.time() - first["time"] + (first["seconds"] or 0.0)
            what = "; ".join(failure["detail"] for failure in self._failures)
            self._events.write("recovered", step=trainer.progress.step, seconds=seconds, detail=what)
            trainer.say(f"step {trainer.progress.step}: recovered {seconds:.1f} s after the failure: {what}")
        self._failures = []
