"""A hook that detects ranks that are persistently slow."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from optimus.resilience.events import EventLog
from optimus.training.record import StepRecord
from optimus.training.rollback import ended_by
from optimus.training.trainer import Hook, Order, Trainer

WINDOW = 10  # steps between two checks
OFTEN = 3  # the hook reports a rank that is slow in this many consecutive checks


class SlowRanks(Hook):
    """Reports ranks whose step time, without waiting for other ranks, is persistently longer than normal.

    A report ends the run under `optimus launch` with `resilience.exclude_slow`.
    """

    order = Order.WATCH

    def __init__(self, node: str | None = None) -> None:
        self._node = node
        self._in_a_row = Counter[int]()
        self._steps: list[float] = []  # seconds of each step since the last check, without waiting for other ranks
        self._usual: dict[int, float] = {}  # the lowest result of `alone` so far, by rank

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._steps.append(record.times.total - record.times.waited)
        if trainer.progress.step % WINDOW:
            return
        told = trainer.groups.world.all_gather_object((statistics.median(self._steps), self._node))
        self._steps.clear()
        seconds = {rank: own for rank, (own, _) in enumerate(told)}
        peers = list(trainer.groups.mesh.groups(("dp", "cp", "tp")))  # ranks of one stage
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

    `seconds` are the computation times per step, without waiting. `peers` are groups of ranks with equal work. A rank
    with peers is slow if the rank's time exceeds the lower median of the group by more than `percent`. A rank without
    peers is slow if its result of `alone` exceeds its entry in `usual` by more than `percent`.

    Sources: MegaScale (Jiang et al. 2024) and C4 (Dong et al. 2024).
    """
    times = {
        rank: _relative(seconds[rank], statistics.median_low(seconds[r] for r in group))
        for group in peers
        for rank in group
    }
    times |= {rank: _relative(relation, usual.get(rank, relation)) for rank, relation in alone(seconds, peers).items()}
    return {
        rank: times[rank] for rank in sorted(times, key=lambda rank: -times[rank]) if times[rank] > 1 + percent / 100
    }


def alone(seconds: Mapping[int, float], peers: Sequence[Sequence[int]]) -> dict[int, float]:
    """Returns the time of each rank without peers, relative to the lower median of all ranks."""
    middle = statistics.median_low(seconds.values())
    return {group[0]: _relative(seconds[group[0]], middle) for group in peers if len(group) == 1}


def _relative(value: float, usual: float) -> float:
    """Returns the ratio, or 1 if `usual` is not positive: a rank may spend a whole step waiting."""
    return value / usual if usual > 0 else 1.0
