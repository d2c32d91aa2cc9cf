"""A hook that detects ranks that keep the others waiting in every step."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from optimus.resilience.events import EventLog
from optimus.training.record import StepRecord
from optimus.training.rollback import ended_by
from optimus.training.trainer import Hook, Order, Trainer

WINDOW = 10  # steps per window; the median of a rank's own times ignores occasional other work of its node
OFTEN = 3  # consecutive windows after which a slow rank is reported


class SlowRanks(Hook):
    """Reports ranks whose own part of a step takes persistently longer than that of their peers."""

    order = Order.WATCH

    def __init__(self, node: str | None = None) -> None:
        self._node = node
        self._in_a_row = Counter[int]()  # windows in which a rank was slow
        self._steps: list[float] = []  # seconds of this rank's own work in each step of the window
        self._usual: dict[int, float] = {}  # lowest relation to the median so far, for ranks without peers

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._steps.append(record.times.whole - record.times.waited)
        if trainer.progress.step % WINDOW:
            return
        told = trainer.groups.world.all_gather_object((statistics.median(self._steps), self._node))
        self._steps.clear()
        seconds = {rank: own for rank, (own, _) in enumerate(told)}
        peers = list(trainer.groups.mesh.groups(("dp", "cp", "tp")))  # the ranks of one stage compute alike
        found = find_slow(seconds, peers, trainer.config.resilience.slow, self._usual)
        for rank, relation in alone(seconds, peers).items():
            self._usual[rank] = min(relation, self._usual.get(rank, relation))
        self._in_a_row = Counter({rank: self._in_a_row[rank] + 1 for rank in found})
        for rank, times in found.items():
            if self._in_a_row[rank] == OFTEN:
                self._tell(trainer, rank, times, told[rank][1])

    def _tell(self, trainer: Trainer, rank: int, times: float, node: str | None) -> None:
        detail = f"rank {rank} takes {times:.2f} times as long for its part of a step as its peers"
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
    """Returns the ranks that compute longer than their peers' median by `percent`, the slowest first, with their slowdown
    factor.

    `seconds` are the computation times per step, without waiting (MegaScale; C4). `peers` are groups of ranks with equal
    work, such as the ranks of one pipeline stage. Of two peers, the faster one is the reference, because nothing makes a
    rank faster than normal. A rank without peers has work of its own: it is slow if its relation to all ranks exceeds its
    `usual` relation (the lowest of `alone` so far), not if it merely has more work.
    """
    times = {
        rank: seconds[rank] / statistics.median_low(seconds[r] for r in group) for group in peers for rank in group
    }
    times |= {rank: relation / usual.get(rank, relation) for rank, relation in alone(seconds, peers).items()}
    return {
        rank: times[rank] for rank in sorted(times, key=lambda rank: -times[rank]) if times[rank] > 1 + percent / 100
    }


def alone(seconds: Mapping[int, float], peers: Sequence[Sequence[int]]) -> dict[int, float]:
    """Returns the time of each rank without peers, relative to the median of all ranks."""
    middle = statistics.median_low(seconds.values())
    return {group[0]: seconds[group[0]] / middle for group in peers if len(group) == 1}
