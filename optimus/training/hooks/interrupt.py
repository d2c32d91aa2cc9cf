"""A hook that ends a run on SIGINT, SIGTERM or SIGHUP."""

import signal
import threading
from types import FrameType
from typing import Any

from optimus.observe.signals import ending_signals, restore_handlers
from optimus.observe.terminal import let_go_if_gone, say_at_once
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class Interrupt(Hook):
    """Lets the step finish on one of `ending_signals`, such as Ctrl-C; then the run saves a checkpoint and ends.

    Has no effect outside the main thread.
    """

    order = Order.SIGNALS

    def __init__(self) -> None:
        self._signalled = 0
        self._previous: dict[signal.Signals, Any] = {}

    def before_training(self, trainer: Trainer) -> None:
        self._speaks = trainer.groups.rank == 0
        alone = threading.current_thread() is threading.main_thread()  # only the main thread may set signal handlers
        for number in ending_signals() if alone else ():
            self._previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_if_gone()
        if self._speaks and not self._signalled:
            say_at_once(f"{signal.Signals(number).name}: finishing the step, then saving a checkpoint")
        self._signalled = number

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if self._signalled:
            trainer.stop(signal=self._signalled)

    def after_training(self, trainer: Trainer) -> None:
        restore_handlers(self._previous)
