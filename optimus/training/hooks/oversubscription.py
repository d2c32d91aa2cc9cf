"""A hook that warns when too many threads compete for a CPU's cores."""

import os
import statistics
import time
from pathlib import Path

import torch

from optimus.cores import usable_cores
from optimus.resolve.ranks import ranks_sharing_memory
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

WINDOW = 10  # steps between two checks; a check takes the median step time
FACTOR = 3.0  # steps are slow if the median is above this multiple of the lowest median before
_CROWDED = 1.25  # more runnable threads per core than this are too many
_STARVED = 0.5  # minimum mean CPU time of a thread, relative to the wall-clock time
_AGAIN = 1.5  # a new warning needs a median, since the last warning, of at most this multiple of the lowest


def threads_wanted() -> float:
    """Returns the number of the machine's runnable threads; without /proc/loadavg, the load average of a minute."""
    try:
        return float(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]


class Oversubscription(Hook):
    """Warns when CPU steps are much slower than the fastest steps, or a rank's several threads get little CPU time.

    Warns only if the machine's runnable threads, or the threads of its ranks, exceed 1.25 per core.
    """

    order = Order.MEASURE
    ranks = "first"

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._wanted: list[float] = []
        self._fastest = float("inf")
        self._said = False

    def before_training(self, trainer: Trainer) -> None:
        self._spent = time.process_time()  # CPU seconds of all threads of this process

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        spent = time.process_time()
        self._seconds.append(record.times.total)
        self._wanted.append(threads_wanted())
        if len(self._seconds) < WINDOW:
            return
        share = (spent - self._spent) / (sum(self._seconds) * torch.get_num_threads())
        self._judge(trainer, statistics.median(self._seconds), statistics.fmean(self._wanted), share)
        self._spent = spent
        self._seconds.clear()
        self._wanted.clear()

    def _judge(self, trainer: Trainer, seconds: float, wanted: float, share: float) -> None:
        slower = seconds / self._fastest
        self._fastest = min(self._fastest, seconds)
        ranks, cores, threads = (
            ranks_sharing_memory(trainer.groups.mesh, trainer.run.device),
            usable_cores(),
            torch.get_num_threads(),
        )
        wanted = max(wanted, float(ranks * threads))
        slow, starved = slower > FACTOR, share < _STARVED and threads > 1
        if not (slow or starved) or wanted <= _CROWDED * cores:
            self._said = self._said and slower > _AGAIN
            return
        if self._said:
            return
        self._said = True
        how = f"{slower:.1f} times as long as the fastest steps before" if slow else f"{seconds:.3g} s"
        others = max(0.0, wanted - ranks * threads)
        enough = max(1, int((cores - others) / ranks))
        if enough < threads:
            cure = f"set OMP_NUM_THREADS={enough}, or end other programs"
        else:
            cure = "end other programs" if others >= 1 else f"use at most {cores} ranks on this machine"
        trainer.say(
            f"step {trainer.progress.step}: steps take {how}, and {wanted:.0f} threads compete for the {cores} cores of "
            f"this machine (the {ranks} x {threads} threads of this run get {100 * min(1.0, share):.0f} % of the time that "
            f"they need): {cure}"
        )
