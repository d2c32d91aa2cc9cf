"""Adds the passes of the embedding and of the output layer to a schedule; every rank has a shard of the vocabulary.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, Yeung et al. 2024, section 5.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from optimus.pipeline.replay import ScheduleError
from optimus.pipeline.schedule import VOCABULARY_ALGORITHMS, Action, Kind, Schedule
from optimus.pipeline.transfers import USUAL

_BEFORE = (Kind.LOSS, Kind.LOGITS, Kind.EMBED)  # passes that come before those of the stages

_HELD = 2  # maximum number of ready embedding gradients that a rank defers


def with_vocabulary(schedule: Schedule, algorithm: int = 1, *, backward: bool = True) -> Schedule:
    """Inserts the vocabulary passes into `schedule`, which must contain only computations.

    `algorithm` is a key of `VOCABULARY_ALGORITHMS`. Without `backward`, the schedule must contain only forward passes,
    and the function inserts only the embedding passes. The new order is the result of a simulation with the times
    `USUAL`: the computation that can begin earliest runs next. Raises `ScheduleError` when a computation can never run.
    """
    playing = _Playing(replace(schedule, vocabulary=VOCABULARY_ALGORITHMS[algorithm]), backward)
    while playing.remaining:
        if not playing.step():
            raise ScheduleError(
                f"schedule {schedule.name}: the order of its actions leaves no place for the passes of the vocabulary"
            )
    return playing.schedule.in_order(playing.orders)


class _Option(NamedTuple):
    """A possible next action of a rank; the smallest option runs first."""

    start: float
    priority: int
    rank: int
    action: Action


class _Playing:
    """The state of the simulation, with a queue of the first option of each rank."""

    def __init__(self, schedule: Schedule, backward: bool) -> None:
        self.schedule = schedule
        self._duration = USUAL.durations(schedule)
        self.orders: list[list[Action]] = [[] for _ in range(schedule.ranks)]
        self._before = _BEFORE if backward else (Kind.EMBED,)
        self._after = (Kind.EMBED_BACKWARD,) if backward else ()
        self._following = [dict.fromkeys((*self._before, *self._after), 0) for _ in self.orders]
        passes = len(self._following[0]) * schedule.ranks * schedule.microbatches
        self.remaining = sum(map(len, schedule.actions)) + passes
        self._position = [0] * schedule.ranks
        self._free = [0.0] * schedule.ranks
        self._end_times: dict[Action, float] = {}
        # (number of ranks that have run the pass, latest end), by vocabulary pass
        self._passes: dict[tuple[Kind, int], tuple[int, float]] = {}
        self._queue: list[_Option] = []
        self._first: list[_Option | None] = [None] * schedule.ranks
        self._look(range(schedule.ranks))

    def step(self) -> bool:
        """Runs the action that can begin first; returns False if no action can run."""
        while self._queue and self._queue[0] is not self._first[self._queue[0].rank]:
            heappop(self._queue)  # outdated
        if not self._queue:
            return False
        start, _, rank, action = heappop(self._queue)
        self._end_times[action] = self._free[rank] = start + self._duration(action)
        self.orders[rank].append(action)
        if action.kind.is_vocabulary:
            self._following[rank][action.kind] += 1
            done, end = self._passes.get((action.kind, action.microbatch), (0, 0.0))
            self._passes[action.kind, action.microbatch] = done + 1, max(end, self._free[rank])
        else:
            self._position[rank] += 1
        self.remaining -= 1
        self._look(self._touched(rank, action))
        return True

    def _touched(self, rank: int, action: Action) -> Iterable[int]:
        stages = self.schedule.stages
        if action.kind.is_vocabulary:
            done, _ = self._passes[action.kind, action.microbatch]
            return range(self.schedule.ranks) if done == self.schedule.ranks else (rank,)
        if action.stage in (0, stages - 1):
            return range(self.schedule.ranks)
        return {rank, self.schedule.rank_of(action.stage - 1), self.schedule.rank_of(action.stage + 1)}

    def _look(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            found = min(self._options(rank), default=None)
            if found != self._first[rank] or found is None:
                self._first[rank] = found
                if found is not None:
                    heappush(self._queue, found)

    def _options(self, rank: int) -> Iterator[_Option]:
        following, position = self._following[rank], self._position[rank]
        candidates = [Action(kind, rank, following[kind]) for kind in self._before]
        candidates += self.schedule.actions[rank][position : position + 1]
        for kind in self._after:
            number = following[kind]
            late = Action(self.schedule.first_backward, 0, number + _HELD) in self._end_times
            candidates.insert(0 if late else len(candidates), Action(kind, rank, number))
        for priority, action in enumerate(candidates):
            ready = self._ready(action) if action.microbatch < self.schedule.microbatches else None
            if ready is not None:
                yield _Option(max(self._free[rank], ready), priority, rank, action)

    def _ready(self, action: Action) -> float | None:
        sources, of_all = self.schedule.waits_for(action)
        times = [self._end_times.get(source) for source in sources]
        if of_all is not None:
            done, end = self._passes.get((of_all, action.microbatch), (0, 0.0))
            times.append(end if done == self.schedule.ranks else None)
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None
