"""The rank that writes sees to it that the run folder is still its run's."""

import time

from optimus.checkpoint.lease import BEAT, check_held
from optimus.train.hooks import Hook
from optimus.train.run import Run
from optimus.train.step import StepResult


class Holding(Hook):
    """Ends the run, with nothing more written, when another one has taken its folder over; on rank 0, before other hooks."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._looked = time.monotonic()

    def after_step(self, run: Run, result: StepResult) -> None:
        if time.monotonic() - self._looked > BEAT:
            self._looked = time.monotonic()
            check_held(run.folder, self._token)
