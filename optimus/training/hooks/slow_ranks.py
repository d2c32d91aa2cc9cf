"""A hook that detects ranks that are persistently slow."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from optimus.resilience.events import EventLog
from optimus.training.record import StepRecord
from optimus.training.rollback import ended_by
from optimus.training.trainer import Hook, Order, Trainer

WINDOW = 10  # steps per window; the median over a window ignores occasional disturbances by other programs
OFTEN = 3  # the hook reports a rank that is slow in this many consecutive windows


class SlowRanks(Hook):
    """Reports ranks whose step time, without waiting for other ranks, is persistently longer than normal.

    With `resilience.exclude_slow`, ends the run under `optimus launch`, so that the launcher replaces the node.
    """

    order = Order.WATCH

    def __init__(self, node: str | None = None) -> None:
        self._node = node
        self._in_a_row = Counter[int]()  # number of consecutive windows in which a rank was slow
        self._steps: list[float] = []  # seconds of each step of the window, without waiting for other ranks
        self._usual: dict[int, float] = {}  # for ranks without peers: lowest ratio so far to the median of all ranks

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._steps.append(record.times.total - record.times.waited)
        if trainer.progress.step % WINDOW:
            return
        told = trainer.groups.world.all_gather_object((statistics.median(self._steps), self._node))
        self._steps.clear()
        seconds = {rank: own for rank, (own, _) in enumerate(told)}
        peers = list(trainer.groups.mesh.groups(("dp", "cp", "tp")))  # the ranks of one stage have about equal work
        found = find_slow(seconds, peers, trainer.config.resilience.slow, self._usual)
        for rank, relation in alone(seconds, peers).items():
            self._usual[rank] = min(relation, self._usual.get(rank, relation))
        self._in_a_row = Counter({rank: self._in_a_row[rank] + 1 for rank in found})
        for rank, times in found.items():
            if self._in_a_row[rank] == OFTEN:
                self._tell(trainer, rank, times, told[rank][1])

    def _tell(self, trainer: Trainer, rank: int, times: float, node: str | None) -> None:
        detail = f"rank {rank} takes {times:.2f} times as long as normal for its part of a step"
        trainer.say(f"step {trainer.progress.step}: {detail}" + (f" (node {node})" if node is not None else ""))
        if self._node is None:
            return
        if trainer.groups.rank == 0:
            EventLog(trainer.folder).write("failure", node=node, rank=rank, step=trainer.progress.step, detail=detail)
        if trainer.config.resilience.exclude_slow:
            raise ended_by(trainer, node == self._node, detail)


def find_slow(
    seconds: Mapping[int, float], peers: Sequence[Sequence[int]], percent: float, usual: Mapping[int, float]
) -> dict[int, float]:
    """Returns the slow ranks, each with a slowdown factor, in descending order of the factors.

    `seconds` are the computation times per step, without waiting (MegaScale; C4). `peers` are groups of ranks with
    equal work, such as the ranks of one pipeline stage. A rank is slow if its time exceeds the lower median of its
    group by more than `percent`. A rank without peers is slow if its time relative to all ranks (see `alone`) exceeds
    the rank's lowest ratio so far, in `usual`, by more than `percent`.
    """
    times = {
        rank: seconds[rank] / statistics.median_low(seconds[r] for r in group) for group in peers for rank in group
    }
    times |= {rank: relation / usual.get(rank, relation) for rank, relation in alone(seconds, peers).items()}
    return {
        rank: times[rank] for rank in sorted(times, key=lambda rank: -times[rank]) if times[rank] > 1 + percent / 100
    }


def alone(seconds: Mapping[int, float], peers: Sequence[Sequence[int]]) -> dict[int, float]:
    """Returns the time of each rank without peers, relative to the lower median of all ranks."""
    middle = statistics.median_low(seconds.values())
    return {group[0]: seconds[group[0]] / middle for group in peers if len(group) == 1}
