"""A hook that measures the load imbalance of experts."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from optimus.training.accounting import expert_load
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class ExpertLoad(Hook):
    """Measures each expert's number of tokens over all ranks, relative to the mean of the expert's layer, every
    `observe.log_every` steps."""

    order = Order.MEASURE

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._choices: Mapping[Any, Tensor] = {}

    def before_step(self, trainer: Trainer) -> None:
        if (trainer.progress.step + 1) % trainer.config.observe.log_every == 0:
            self._choices = self._stack.enter_context(trainer.groups.step.counting())

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if trainer.progress.step % trainer.config.observe.log_every:
            return
        self._stack.close()
        record.expert_load.update(expert_load(trainer.run, self._choices))

    def after_training(self, trainer: Trainer) -> None:
        self._stack.close()
