"""A hook that reports a step without predicted tokens."""

from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class NothingPredicted(Hook):
    """Reports the first step of a process whose global batch has no predicted token."""

    order = Order.RECORD
    ranks = "first"

    def __init__(self) -> None:
        self._said = False

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if record.result.predicted == 0 and not self._said:
            self._said = True
            trainer.say(
                f"step {trainer.progress.step}: no token of the global batch is predicted, so there is no loss to learn "
                "from: all labels are -100 or padding. Look at the data (`optimus data`), or at the labels of the dataset"
            )
