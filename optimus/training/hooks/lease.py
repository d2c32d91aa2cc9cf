"""A hook that checks the lease of the run folder."""

import time

from optimus.checkpoint.lease import BEAT, check_lease
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class LeaseCheck(Hook):
    """Ends the run without another checkpoint if another run has taken the folder over."""

    order = Order.FIRST
    ranks = "first"

    def __init__(self, token: str) -> None:
        self._token = token
        self._looked = time.monotonic()

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if time.monotonic() - self._looked > BEAT:
            self._looked = time.monotonic()
            check_lease(trainer.folder, self._token)
