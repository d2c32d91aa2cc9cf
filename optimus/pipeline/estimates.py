"""Estimates the time and the live microbatches of a pipeline.

Functions that need a schedule generate one with few microbatches, and assume a steady state for the others.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from optimus.pipeline.costs import Costs
from optimus.pipeline.replay import replay
from optimus.pipeline.schedule import Action, Kind, barriers
from optimus.pipeline.schedules import Sizes, make_schedule, naming_schedule, schedules
from optimus.pipeline.simulation import makespan

_PARTS = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS, Kind.BACKWARD]
_schedule = lru_cache(maxsize=4096)(make_schedule)
_ROUNDS = 2  # microbatches per rank before the assumed steady state, with a `warmup_factor` of 1


class StageTimes(NamedTuple):
    """The seconds of one microbatch in a stage, by pass."""

    forward: float
    backward: float  # gradients of inputs, and recomputation
    weights: float

    @property
    def seconds(self) -> float:
        """The sum of the three passes."""
        return sum(self)


def pipeline_seconds(
    name: str,
    ranks: int,
    microbatches: int,
    times: Sequence[StageTimes],
    link: float,
    *,
    blocking: bool = False,
    warmup_factor: float = 1.0,
) -> float:
    """Estimates the time of a step's passes on the pipeline, including bubbles, in seconds.

    `times` has one entry per stage. `link` is the time of a message between two ranks, in seconds. With `blocking`,
    ranks wait for their transfers.
    """
    if ranks == 1:
        return microbatches * sum(stage.seconds for stage in times)
    few = _few(name, ranks, microbatches, warmup_factor)
    slowest = max(
        sum(times[stage].seconds for stage in own) for own in stages_of_ranks(name, ranks, len(times) // ranks)
    )

    def seconds_of(number: int) -> float:
        if not blocking:
            return _beginning(name, ranks, number, tuple(times), link, warmup_factor)
        forward, backward, weights = map(list, zip(*times))
        costs = Costs(forward, backward, weights, link=link, blocking=True)
        return makespan(_schedule(name, ranks, number, len(times) // ranks, warmup_factor), costs)

    begin = seconds_of(few)
    if microbatches > few and schedules()[name].recurs:
        slowest = max(slowest, (begin - seconds_of(few - ranks)) / ranks)
    return begin + (microbatches - few) * slowest


@lru_cache(maxsize=4096)
def _beginning(
    name: str, ranks: int, microbatches: int, times: tuple[StageTimes, ...], link: float, warmup_factor: float
) -> float:
    lasting = [seconds for each in times for seconds in (*each, each.backward + each.weights)]
    free, ends = [0.0] * ranks, array("d")
    for rank, what, source, away in zip(*_replayed(name, ranks, microbatches, len(times) // ranks, warmup_factor)):
        start = free[rank]
        if source >= 0:
            there = ends[source] + link if away else ends[source]
            start = there if there > start else start
        free[rank] = start + lasting[what]
        ends.append(free[rank])
    return max(ends)


@lru_cache(maxsize=512)
def _replayed(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, warmup_factor: float
) -> tuple["array[int]", ...]:
    """Returns the computations of a schedule in a feasible order, as four columns.

    The columns are:
        - the rank
        - 4 * stage + (index of the pass in `_PARTS`)
        - the row of the computation that produces the input; -1 without an input
        - 1 if the input comes from another rank; otherwise 0
    """
    plan = _schedule(name, ranks, microbatches, stages_per_rank, warmup_factor, transfers=False)
    done = {action: number for number, action in enumerate(replay(plan, plan.actions, lambda action: 0.0))}
    columns = array("i"), array("i"), array("i"), array("b")
    for action in done:
        source = plan.input_of(action)
        columns[0].append(plan.rank_of(action.stage))
        columns[1].append(4 * action.stage + _PARTS.index(action.kind))
        columns[2].append(-1 if source is None else done[source])
        columns[3].append(source is not None and plan.rank_of(source.stage) != plan.rank_of(action.stage))
    return columns


def least_seconds(name: str, microbatches: int, times: Sequence[StageTimes], busy: Sequence[float]) -> float:
    """Returns a lower bound of `pipeline_seconds`.

    `busy` has one number per rank: the seconds that one microbatch takes in the rank's stages.
    """
    idle = schedules()[name].idle
    stages = {id(each): each for each in times}
    with naming_schedule(name, "idle"):
        known = {number: idle(stage.forward, stage.seconds) for number, stage in stages.items()}
    found = before = 0.0
    for own, stage in zip(busy, times):
        found = max(found, microbatches * own + before)
        before += known[id(stage)]
    return found


def _few(name: str, ranks: int, microbatches: int, warmup_factor: float) -> int:
    few = ranks * (_ROUNDS - 1 + math.ceil(warmup_factor))
    if microbatches <= few:
        return microbatches
    return few + (microbatches - few) % ranks if schedules()[name].in_rounds else few


class Live(NamedTuple):
    """The numbers of microbatches with saved data, one number for each stage of a rank."""

    saved: tuple[int, ...]
    """Microbatches with saved activations."""
    waiting: tuple[int, ...]
    """Microbatches between the two parts of a split backward pass."""

    def bytes(self, saved: Sequence[float], waiting: Sequence[float]) -> float:
        """Returns the bytes of the saved data; `saved` and `waiting` have the bytes of one microbatch in each stage."""
        return sum(map(mul, self.saved, saved)) + sum(map(mul, self.waiting, waiting))


@lru_cache(maxsize=4096)
def live_microbatches(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    vocabulary: int = 0,
    warmup_factor: float = 1.0,
) -> tuple[tuple[Live, ...], ...]:
    """Returns each rank's peaks of live microbatches at the start of backward passes.

    A rank may have several peaks, because its stages may peak at different times (see `largest`).
    `vocabulary` is 0, or with a shard of the vocabulary on every rank a key of `VOCABULARY_ALGORITHMS`.
    """
    if ranks == stages_per_rank == 1:
        return ((Live((1,), (0,)),),)
    live = schedules()[name].live
    if live is not None:  # a closed form of the computation below
        sizes = Sizes(ranks, microbatches, warmup_factor=warmup_factor, ahead=barriers(vocabulary))
        with naming_schedule(name, "live"):
            return tuple((Live((min(microbatches, live(sizes, rank)),), (0,)),) for rank in range(ranks))
    few = _few(name, ranks, microbatches, warmup_factor)
    plan = _schedule(name, ranks, few, stages_per_rank, warmup_factor, vocabulary=vocabulary, transfers=False)
    owned = stages_of_ranks(name, ranks, stages_per_rank)
    return tuple(_most(actions, own) for own, actions in zip(owned, plan.actions))


def _most(actions: Iterable[Action], stages: Sequence[int]) -> tuple[Live, ...]:
    saved, waiting, seen = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0), set[Live]()
    for action in actions:
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            seen.add(Live(tuple(saved.values()), tuple(waiting.values())))
        if action.kind in _SAVED:
            saved[action.stage] += _SAVED[action.kind]
        if action.kind in _WAITING:
            waiting[action.stage] += _WAITING[action.kind]
    return largest(seen)


_SAVED = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1}
_WAITING = {Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHTS: -1}


def largest(seen: Iterable[Live]) -> tuple[Live, ...]:
    """Returns the distinct elements of `seen` for which no other element is at least as large in every number."""
    several = set(seen)
    return tuple(
        one
        for one in several
        if not any(
            other != one and all(map(int.__ge__, (*other.saved, *other.waiting), (*one.saved, *one.waiting)))
            for other in several
        )
    )


@lru_cache(maxsize=1024)
def stages_of_ranks(name: str, ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """Returns the stages of each rank, in ascending order."""
    placement = schedules()[name].without_actions(ranks, stages_per_rank)
    return tuple(tuple(placement.stages_of(rank)) for rank in range(ranks))
