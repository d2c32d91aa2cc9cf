"""How long a pipeline takes, and how many microbatches are live, without playing all of its schedule.

The beginning and the end of a step are simulated; in between every rank repeats itself, as fast as the slowest one.
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
_ROUNDS = 2  # times the ranks, in microbatches: after so many a schedule repeats itself


class StageTimes(NamedTuple):
    """Seconds of one microbatch in a stage."""

    forward: float
    backward: float  # of the input, with what is recomputed
    weights: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)


def pipeline_seconds(
    name: str, ranks: int, microbatches: int, times: Sequence[StageTimes], link: float, *, blocking: bool = False
) -> float:
    """Of a step of `microbatches`, with the `times` of each stage. `link` is what a message takes.

    Raises `UserError` when there is no such schedule.
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
    """`makespan` without looking anything up: a search asks for it with many times of the same schedule."""
    lasting = [seconds for each in times for seconds in (*each, each.backward + each.weights)]
    free, ends = [0.0] * ranks, array("d")
    for rank, what, source, away in zip(*_replayed(name, ranks, microbatches, len(times) // ranks)):
        start = free[rank]
        if source >= 0:
            there = ends[source] + link if away else ends[source]
            start = there if there > start else start  # as `max`, which takes longer
        free[rank] = start + lasting[what]
        ends.append(free[rank])
    return max(ends)


@lru_cache(maxsize=512)
def _replayed(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple["array[int]", ...]:
    """The computations of a schedule in an order in which they can be done: of each its rank, four times its stage and what
    part of a microbatch it is, which of them it waits for (or -1), and whether that is on another rank."""
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
    """What `pipeline_seconds` is no less than: a rank's own time, and what the stages before it leave it idle. `busy` are
    the seconds of a microbatch in all stages of each rank; `times` are best those of few objects, as stages are alike."""
    idle = schedules()[name].idle
    known = {number: idle(stage.forward, stage.seconds) for number, stage in {id(each): each for each in times}.items()}
    found = before = 0.0
    for own, stage in zip(busy, times):
        found = max(found, microbatches * own + before)
        before += known[id(stage)]
    return found


def _few(name: str, ranks: int, microbatches: int) -> int:
    """Microbatches from which on a step only repeats itself: of the same remainder, where a schedule looks at that."""
    few = _ROUNDS * ranks
    if microbatches <= few:
        return microbatches
    return few + (microbatches - few) % ranks if schedules()[name].in_rounds else few


class Live(NamedTuple):
    """Of each stage of a rank, in order: microbatches for which it keeps something."""

    kept: tuple[int, ...]
    """Their activations, from the forward pass to the backward pass."""
    waiting: tuple[int, ...]
    """Of split backward passes, between the two parts: what the part for the weights needs."""

    def bytes(self, kept: Sequence[float], waiting: Sequence[float]) -> float:
        """That they take, where a microbatch takes so many in each stage."""
        return sum(map(mul, self.kept, kept)) + sum(map(mul, self.waiting, waiting))


@lru_cache(maxsize=4096)
def live_microbatches(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    vocabulary: bool = False,
    warmup_factor: float = 1.0,
) -> tuple[tuple[Live, ...], ...]:
    """Of each rank: what it keeps when it keeps most, as a backward pass begins; all times of which no other has as many of
    every stage.

    With `vocabulary` it is divided over all ranks, and more microbatches are under way; so they are with a `warmup_factor`
    above 1. A rank's order decides it, whatever its passes take.
    """
    if ranks == 1:
        return ((Live((1,), (0,)),),)
    live = schedules()[name].live
    if live is not None:  # as below, sooner
        sizes = Sizes(ranks, microbatches, warmup_factor=warmup_factor, ahead=AHEAD if vocabulary else 0)
        return tuple((Live((min(microbatches, live(sizes, rank)),), (0,)),) for rank in range(ranks))
    few = _few(name, ranks, microbatches)
    plan = _schedule(name, ranks, few, stages_per_rank, vocabulary=vocabulary, transfers=False)
    owned = stages_of_ranks(name, ranks, stages_per_rank)
    return tuple(_most(actions, own) for own, actions in zip(owned, plan.actions))


def _most(actions: Iterable[Action], stages: Sequence[int]) -> tuple[Live, ...]:
    kept, waiting, seen = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0), set[Live]()
    for action in actions:
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            seen.add(Live(tuple(kept.values()), tuple(waiting.values())))
        if action.kind in _KEPT:
            kept[action.stage] += _KEPT[action.kind]
        if action.kind in _WAITING:
            waiting[action.stage] += _WAITING[action.kind]
    return largest(seen)


_KEPT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1}
_WAITING = {Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHTS: -1}


def largest(seen: Iterable[Live]) -> tuple[Live, ...]:
    """Those of which no other has as many of every stage."""
    several = set(seen)
    return tuple(
        one
        for one in several
        if not any(
            other != one and all(map(int.__ge__, (*other.kept, *other.waiting), (*one.kept, *one.waiting)))
            for other in several
        )
    )


@lru_cache(maxsize=1024)
def stages_of_ranks(name: str, ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """Stages of each rank of the pipeline, in order."""
    place = schedules()[name].place(ranks, stages_per_rank)
    return tuple(tuple(place.stages_of(rank)) for rank in range(ranks))
