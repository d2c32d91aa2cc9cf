"""A hook that estimates when a run will end."""

import time

from optimus.observe.progress import time_left
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

_STEPS_TO_KNOW = 3  # steps measured before the estimate


class TimeLeft(Hook):
    """Reports the probable end of the run, after three steps of this process."""

    order = Order.RECORD
    ranks = "first"

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._seconds.append(record.times.total)
        remaining = trainer.run.last_step - trainer.progress.step
        if len(self._seconds) == _STEPS_TO_KNOW and remaining > 0:
            each = min(self._seconds)  # the first steps may take longer
            trainer.say(f"time: {time_left(each * remaining, time.time())}, at {each:.3g} s a step")
