"""How long a pipeline takes, and how much it keeps, from the schedule that would run it.

The beginning and the end of a step are simulated; in between every rank repeats itself, as fast as the slowest one.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from optimus.pipeline.costs import Costs
from optimus.pipeline.schedule import Placement, Schedule
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
def schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """The schedule that trains so. Raises `UserError` for numbers that it cannot take."""
    return make_schedule(name, ranks, microbatches, stages_per_rank)


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


@lru_cache(maxsize=4096)
def live_microbatches(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """Of each rank: the most microbatches of each of its stages whose activations it keeps when it keeps most of all.

    A pass takes as long in every stage, and backward twice as long as forward.
    """
    if ranks == 1:
        return ((1,),)
    plan = schedule(name, ranks, _few(ranks, microbatches), stages_per_rank)
    timeline = simulate(plan)
    return tuple(_share(peak, stages_per_rank) for peak in timeline.peak_activations)


def _share(peak: int, stages: int) -> tuple[int, ...]:
    """The stages of a rank take turns, the first of them being ahead."""
    return tuple(peak // stages + (number < peak % stages) for number in range(stages))


def stages_on(name: str, ranks: int, stages_per_rank: int, rank: int) -> list[int]:
    """Stages of a rank of the pipeline, in order."""
    placement: Placement = "v" if name == "zbv" else "loop"
    return list(Schedule(name, ranks, 0, (), stages_per_rank, placement).stages_of(rank))
