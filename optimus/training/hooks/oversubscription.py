"""A hook that detects that more threads compete for cores than the machine has.

The threads of a matmul wait for each other, so that one preempted thread delays the whole matmul. A step can then take
many times as long.
"""

import os
import statistics
import time
from pathlib import Path

import torch

from optimus.cores import usable_cores
from optimus.resolve.ranks import ranks_sharing_memory
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

WINDOW = 10  # steps per window; the hook compares the median step times of windows
FACTOR = 3.0  # a window more than this many times slower than the run's fastest window is slow
_CROWDED = 1.25  # more runnable threads per core than this are too many
_STARVED = 0.5  # minimum mean CPU time of a thread, relative to the wall-clock time
_AGAIN = 1.5  # the run has recovered once a window is at most this many times slower than the fastest window


def threads_wanted() -> float:
    """Returns the number of the machine's threads that run or wait for a core.

    Where the system does not provide the current number, returns the average of the last minute.
    """
    try:
        return float(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]


class Oversubscription(Hook):
    """Warns when steps on a CPU are more than three times slower than the run's fastest steps. Also warns when the mean
    CPU time of this rank's threads is less than half of the wall-clock time.

    Warns only if the machine's runnable threads, or the threads of the run's ranks on this machine, exceed 1.25 per
    core. Warns again only after the run has recovered. Runs on rank 0.
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
