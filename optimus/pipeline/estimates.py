"""Estimates the time of a pipeline and its live microbatches without a simulation of the whole schedule.

The module simulates a step with few microbatches. Each further microbatch takes the time of the slowest rank.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from optimus.pipeline.costs import Costs
from optimus.pipeline.replay import replay
from optimus.pipeline.schedule import Action, Kind
from optimus.pipeline.schedules import Sizes, make_schedule, schedules
from optimus.pipeline.schedules.vocabulary import AHEAD
from optimus.pipeline.simulation import makespan

_PARTS = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS, Kind.BACKWARD]
_schedule = lru_cache(maxsize=4096)(make_schedule)
_ROUNDS = 2  # number of microbatches per rank after which a schedule is assumed to be in its steady state


class StageTimes(NamedTuple):
    """The seconds of one microbatch in a stage, by pass."""

    forward: float
    backward: float  # the gradient of the input, including recomputation
    weights: float

    @property
    def seconds(self) -> float:
        """The sum of the seconds of all passes."""
        return sum(self)


def pipeline_seconds(
    name: str, ranks: int, microbatches: int, times: Sequence[StageTimes], link: float, *, blocking: bool = False
) -> float:
    """Estimates the seconds of a step of `microbatches` microbatches, given the `times` of each stage.

    `link` is the seconds of a message. With `blocking`, ranks wait for their transfers as in `Costs.blocking`.

    Raises `UserError` when `ranks` is above 1 and the schedule `name` does not support these sizes.
    """
    if ranks == 1:
        return microbatches * sum(stage.seconds for stage in times)
    few = _few(name, ranks, microbatches)
    slowest = max(
        sum(times[stage].seconds for stage in own) for own in stages_of_ranks(name, ranks, len(times) // ranks)
    )
    if blocking:
        forward, backward, weights = map(list, zip(*times))
        costs = Costs(forward, backward, weights, link=link, blocking=True)
        begin = makespan(_schedule(name, ranks, few, len(times) // ranks), costs)
    else:
        begin = _beginning(name, ranks, few, tuple(times), link)
    return begin + (microbatches - few) * slowest


@lru_cache(maxsize=4096)
def _beginning(name: str, ranks: int, microbatches: int, times: tuple[StageTimes, ...], link: float) -> float:
    """Computes `simulation.makespan` from the cached dependencies of `_replayed`."""
    lasting = [seconds for each in times for seconds in (*each, each.backward + each.weights)]
    free, ends = [0.0] * ranks, array("d")
    for rank, what, source, away in zip(*_replayed(name, ranks, microbatches, len(times) // ranks)):
        start = free[rank]
        if source >= 0:
            there = ends[source] + link if away else ends[source]
            start = there if there > start else start  # faster than `max`
        free[rank] = start + lasting[what]
        ends.append(free[rank])
    return max(ends)


@lru_cache(maxsize=512)
def _replayed(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple["array[int]", ...]:
    """Returns the computations of a schedule in a feasible order, as four columns.

    The first column is the rank. The second is four times the stage plus the index of the pass in `_PARTS`. The third is the
    row of the computation that this computation waits for, or -1. The fourth is 1 if these two computations are on
    different ranks, and 0 otherwise.
    """
    plan = _schedule(name, ranks, microbatches, stages_per_rank, transfers=False)
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
    """Returns a lower bound of `pipeline_seconds`: the largest sum of a rank's computing time and the idle time that earlier
    stages cause.

    `busy` has, for each rank, the seconds of a microbatch in all stages of the rank.
    """
    idle = schedules()[name].idle
    known = {number: idle(stage.forward, stage.seconds) for number, stage in {id(each): each for each in times}.items()}
    found = before = 0.0
    for own, stage in zip(busy, times):
        found = max(found, microbatches * own + before)
        before += known[id(stage)]
    return found


def _few(name: str, ranks: int, microbatches: int) -> int:
    """Returns the number of microbatches to simulate; further microbatches only extend the steady state.

    If the schedule runs in rounds, the number has the same remainder modulo `ranks` as `microbatches`.
    """
    few = _ROUNDS * ranks
    if microbatches <= few:
        return microbatches
    return few + (microbatches - few) % ranks if schedules()[name].in_rounds else few


class Live(NamedTuple):
    """The numbers of microbatches with saved data, one number for each stage of a rank, in ascending order of stages."""

    saved: tuple[int, ...]
    """Microbatches with saved activations, from the forward pass to the backward pass."""
    waiting: tuple[int, ...]
    """Microbatches between the two parts of a split backward pass, with saved data for the weight part."""

    def bytes(self, saved: Sequence[float], waiting: Sequence[float]) -> float:
        """Returns the bytes of the saved data, given the bytes of one microbatch in each stage: `saved` for saved
        activations, `waiting` for the data of the weight part."""
        return sum(map(mul, self.saved, saved)) + sum(map(mul, self.waiting, waiting))


@lru_cache(maxsize=4096)
def live_microbatches(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    vocabulary: bool = False,
    warmup_factor: float = 1.0,
) -> tuple[tuple[Live, ...], ...]:
    """Returns, for each rank, the peaks of saved data at the beginnings of backward passes.

    The peaks of a rank are all states that no other state exceeds or equals in every stage. With `vocabulary`, every
    rank has a shard of the vocabulary. The peaks depend only on the order of a rank's passes, not on their times.
    """
    if ranks == 1:
        return ((Live((1,), (0,)),),)
    live = schedules()[name].live
    if live is not None:  # a closed form of the computation below
        sizes = Sizes(ranks, microbatches, warmup_factor=warmup_factor, ahead=AHEAD if vocabulary else 0)
        return tuple((Live((min(microbatches, live(sizes, rank)),), (0,)),) for rank in range(ranks))
    few = _few(name, ranks, microbatches)
    plan = _schedule(name, ranks, few, stages_per_rank, vocabulary=vocabulary, transfers=False)
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
    """Returns the elements of `seen` that no other element exceeds or equals in every stage."""
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
    """Returns the stages of each rank of the pipeline, in ascending order."""
    placement = schedules()[name].without_actions(ranks, stages_per_rank)
    return tuple(tuple(placement.stages_of(rank)) for rank in range(ranks))
