"""A hook that ends a hung run."""

import os
import time
import uuid
from contextlib import suppress

from optimus.resilience.events import EventLog
from optimus.resilience.exits import Exit
from optimus.resilience.hangs import Verdict, Watchdog, clear, report_folder
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

_TURN = 3.0  # seconds that the ranks of healthy nodes wait, so that the ranks of the culprit node end first


class Hangs(Hook):
    """Ends all ranks if no step completes for `resilience.hang` seconds. If all culprit ranks are on one node,
    the ranks of that node end with `BAD_NODE`. All other ranks end with `LOST`."""

    order = Order.WATCH

    def __init__(self, node: str) -> None:
        self._node = node

    def before_training(self, trainer: Trainer) -> None:
        world = trainer.groups.world
        self._trainer, self._rank = trainer, trainer.groups.rank
        self._names = world.all_gather_object(self._node)
        self._folder = report_folder(trainer.folder, world.broadcast_object(uuid.uuid4().hex))
        hang = trainer.config.resilience.hang
        self._dog = Watchdog(trainer.groups.recorder, self._folder, world.ranks, self._rank, hang, self._end)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._dog.progress()

    def after_training(self, trainer: Trainer) -> None:
        self._dog.stop()
        if self._rank == 0:
            clear(trainer.folder)

    def _end(self, verdict: Verdict) -> None:
        """Ends this rank from the watchdog's thread.

        If all culprits are on one node, the ranks of that node end as soon as the verdict is recorded, at the latest
        after `_TURN` seconds. All other ranks end after `_TURN` seconds.
        """
        told = self._folder / "told"
        culprits = {self._names[rank] for rank in verdict.culprits}
        speaker = next((rank for rank in range(self._trainer.groups.mesh.size) if rank not in verdict.culprits), 0)
        if self._rank == speaker:
            with suppress(OSError):  # a rank that cannot write must end too
                self._tell(verdict)
                told.touch()
        at_fault = self._node in culprits and len(culprits) == 1
        deadline = time.monotonic() + _TURN
        while time.monotonic() < deadline and not (at_fault and told.exists()):
            time.sleep(0.05)
        os._exit(Exit.BAD_NODE if at_fault else Exit.LOST)

    def _tell(self, verdict: Verdict) -> None:
        ranks = ", ".join(map(str, verdict.culprits)) or "unknown"
        first = verdict.culprits[0] if verdict.culprits else None
        EventLog(self._trainer.folder).write(
            "failure",
            node=None if first is None else self._names[first],
            rank=first,
            step=self._trainer.progress.step + 1,
            seconds=self._trainer.config.resilience.hang,
            detail=f"rank {ranks} did not continue; the other ranks waited in {verdict.collective}",
        )
