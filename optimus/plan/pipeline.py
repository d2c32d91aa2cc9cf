"""How long a pipeline takes, and how much it keeps, from the schedule that would run it.

The beginning and the end of a step are simulated; in between every rank repeats itself, as fast as the slowest one.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from optimus.pipeline.costs import Costs
from optimus.pipeline.schedule import Placement, Schedule, live_changes
from optimus.pipeline.schedules import make_schedule
from optimus.pipeline.simulation import makespan, simulate

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


@lru_cache(maxsize=4096)
def schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int, vocabulary: bool = False) -> Schedule:
    """The schedule that trains so. Raises `UserError` for numbers that it cannot take."""
    return make_schedule(name, ranks, microbatches, stages_per_rank, vocabulary=vocabulary)


def pipeline_seconds(
    name: str, ranks: int, microbatches: int, times: Sequence[StageTimes], link: float, *, blocking: bool = False
) -> float:
    """Of a step of `microbatches`, with the `times` of each stage. `link` is what a message takes.

    Raises `UserError` when there is no such schedule.
    """
    if ranks == 1:
        return microbatches * sum(stage.seconds for stage in times)
    few = _few(ranks, microbatches)
    plan = schedule(name, ranks, few, len(times) // ranks)
    costs = Costs(
        [stage.forward for stage in times],
        [stage.backward for stage in times],
        [stage.weights for stage in times],
        link=link,
        blocking=blocking,
    )
    return makespan(plan, costs) + (microbatches - few) * slowest(plan, times)


def least_seconds(name: str, ranks: int, microbatches: int, times: Sequence[StageTimes]) -> float:
    """What `pipeline_seconds` is no less than: a rank's own time, and that of the stages before it to and fro once."""
    per_rank, found, before = len(times) // ranks, 0.0, 0.0
    for rank in range(ranks):
        own = sum(times[stage].seconds for stage in stages_on(name, ranks, per_rank, rank))
        found = max(found, microbatches * own + (0.0 if name == "zbv" else before))
        before += times[rank].forward if name == "zb-h1" else times[rank].seconds  # it fills the end of a step
    return found


def slowest(plan: Schedule, times: Sequence[StageTimes]) -> float:
    """Seconds of a microbatch on the rank that takes longest."""
    busy = [0.0] * plan.ranks
    for stage, each in enumerate(times):
        busy[plan.rank_of(stage)] += each.seconds
    return max(busy)


def _few(ranks: int, microbatches: int) -> int:
    """Microbatches from which on a step only repeats itself: of the same remainder, which some schedules look at."""
    few = _ROUNDS * ranks
    return microbatches if microbatches <= few else few + (microbatches - few) % ranks


Live = tuple[int, ...]
"""Of each stage of a rank, in order: microbatches whose activations it keeps."""


@lru_cache(maxsize=4096)
def live_microbatches(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, vocabulary: bool = False
) -> tuple[tuple[Live, ...], ...]:
    """Of each rank: what it keeps when it keeps most; all times of which no other has as many of every stage.

    With `vocabulary` it is divided over all ranks, and more microbatches are under way.
    A pass takes as long in every stage, and backward twice as long as forward.
    """
    if ranks == 1:
        return (((1,),),)
    if name == "gpipe":
        return (((microbatches,) * stages_per_rank,),) * ranks
    plan = schedule(name, ranks, _few(ranks, microbatches), stages_per_rank, vocabulary)
    return tuple(
        _most(live_changes(events), stages_on(name, ranks, stages_per_rank, rank))
        for rank, events in enumerate(simulate(plan).computations)
    )


def _most(changes: Iterable[tuple[int, int]], stages: Sequence[int]) -> tuple[Live, ...]:
    now, seen = dict.fromkeys(stages, 0), set[Live]()
    for stage, change in changes:
        now[stage] += change
        seen.add(tuple(now.values()))
    return tuple(one for one in seen if not any(other != one and all(map(int.__ge__, other, one)) for other in seen))


@lru_cache(maxsize=4096)
def stages_on(name: str, ranks: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """Stages of a rank of the pipeline, in order."""
    placement: Placement = "v" if name == "zbv" else "loop"
    return tuple(Schedule(name, ranks, 0, (), stages_per_rank, placement).stages_of(rank))
