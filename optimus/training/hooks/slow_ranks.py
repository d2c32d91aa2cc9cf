"""Finds ranks that keep the others waiting in every step."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from optimus.resilience.events import EventLog
from optimus.training.going_back import ended_by
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

WINDOW = 10  # steps of which a rank's own time is the median: what else a node does now and then must not count
OFTEN = 3  # windows in a row after which a slow rank is named


class SlowRanks(Hook):
    """Names ranks whose own part of a step takes persistently longer than that of their peers."""

    order = Order.WATCH

    def __init__(self, node: str | None = None) -> None:
        self._node = node
        self._in_a_row = Counter[int]()  # windows in which a rank was slow
        self._steps: list[float] = []  # seconds of this rank's own in each step of the window
        self._usual: dict[int, float] = {}  # of ranks without peers

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._steps.append(record.times.whole - record.times.waited)
        if trainer.progress.step % WINDOW:
            return
        told = trainer.groups.world.all_gather_object((statistics.median(self._steps), self._node))
        self._steps.clear()
        seconds = {rank: own for rank, (own, _) in enumerate(told)}
        peers = list(trainer.groups.mesh.groups(("dp", "cp", "tp")))  # those of a stage compute alike
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
    """The ranks that compute for longer than their peers' median by `percent`, the slowest first: how many times as long.

    `seconds` are what each computes in a step, waiting left out (MegaScale; C4). `peers` are ranks that have the same to do,
    such as those of one stage of a pipeline; of two, the faster one is the measure, as nothing makes a rank faster than it
    is. A rank without any has other work than everybody else: it is slow when it takes so much longer than what was `usual`
    of it (the least of `alone` so far), not when it has more to do.
    """
    times = {
        rank: seconds[rank] / statistics.median_low(seconds[r] for r in group) for group in peers for rank in group
    }
    times |= {rank: relation / usual.get(rank, relation) for rank, relation in alone(seconds, peers).items()}
    return {
        rank: times[rank] for rank in sorted(times, key=lambda rank: -times[rank]) if times[rank] > 1 + percent / 100
    }


def alone(seconds: Mapping[int, float], peers: Sequence[Sequence[int]]) -> dict[int, float]:
    """How many times the median of all ranks those take that have no peers."""
    middle = statistics.median_low(seconds.values())
    return {group[0]: seconds[group[0]] / middle for group in peers if len(group) == 1}
