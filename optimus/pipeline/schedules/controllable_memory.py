"""Makes V-Half and V-Min, schedules with a limit of live activations below that of 1F1B.

Source: Pipeline Parallelism with Controllable Memory, Qi et al. 2024. A schedule repeats a *building block*, the passes
of one microbatch on all ranks, every `INTERVAL` units of time (section 2). The lifespan of a stage, from its forward
pass to its backward pass, decides how many activations are live. Rank r has stages r and 2 * ranks - 1 - r, so the
lifespans of a rank add up to about the same number on all ranks (sections 3 and 4). "I" below is the paper's "B".
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.schedules.row import ScheduleRow, Sizes

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS
INTERVAL = 6  # time between two building blocks on a rank: two stages with three passes each of time 1
_PASSES = 4  # passes of a building block on a rank, without the weight gradients
Counts = Mapping[Kind, Sequence[int]]  # numbers of microbatches of each stage, by pass


class Starts(NamedTuple):
    """The start times of a building block's passes on one rank, in passes of a stage."""

    forward: int
    second_forward: int
    second_backward: int
    backward: int


class BuildingBlock(NamedTuple):
    """A building block."""

    starts: Callable[[int, int], Starts]  # of (rank, ranks)
    live: Callable[[int], int]
    """Returns the limit of live activations for a number of ranks, in microbatches on both stages of a rank."""


def v_half(rank: int, ranks: int) -> Starts:
    """Returns the starts of V-Half (section 4.1): the first pass of a stage chain advances a rank in 2 units of time,
    the second in 1, both forward and backward. With an even number of ranks, the backward passes begin 3 units later,
    because otherwise a rank would have two passes at one time."""
    turn = 3 * ranks + 3 * (ranks % 2 == 0)
    return Starts(2 * rank, 3 * ranks - rank - 2, turn + 2 * rank - 1, turn + 3 * ranks - rank - 2)


def v_min(rank: int, ranks: int) -> Starts:
    """Returns the starts of V-Min (section 4.1): every pass follows its input at once. If 3 divides the number of
    ranks, the backward passes begin 2 units later, because otherwise a rank would have two passes at one time."""
    turn = 2 * ranks + 2 * (ranks % 3 == 0)
    return Starts(rank, 2 * ranks - rank - 1, turn + rank, turn + 2 * ranks - rank - 1)


def controllable(name: str, block: BuildingBlock, sizes: Sizes) -> Schedule:
    """Makes the schedule that repeats `block`: rank r has stages r and 2 * ranks - 1 - r.

    A rank has at most 2 * `block.live(ranks)` live activations, each of one stage and one microbatch; `ahead` adds two
    for each microbatch. The order comes from a simulation with equal times. A rank runs the first pass in the order of
    the repeated building block that has its input, if the limit leaves room for all forward passes that precede in
    this order. Otherwise the rank runs a weight gradient (the paper's squeezing and reordering, section 4.2).
    """
    ranks, microbatches, ahead = sizes.ranks, sizes.microbatches, sizes.ahead
    schedule = Schedule(name, ranks, microbatches, (), stages_per_rank=2, placement="v", splits_backward=True)
    limit = 2 * (block.live(ranks) + ahead)
    waiting = [
        _Waiting(schedule.stages_of(rank), block.starts(rank, ranks), microbatches, limit, ahead)
        for rank in range(ranks)
    ]
    done = {kind: [0] * schedule.stages for kind in (F, I, W)}  # finished microbatches of each stage, by pass
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while sum(done[W]) < schedule.stages * microbatches:
        # For all ranks, the number of microbatches with an input at the beginning of the turn.
        there = {F: [microbatches, *done[F][:-1]], I: [*done[I][1:], done[F][-1]], W: done[I].copy()}
        for order, passes in zip(orders, waiting):
            if (chosen := passes.choose(there, done)) is not None:
                kind, stage = chosen
                order.append(Action(kind, stage, done[kind][stage]))
                done[kind][stage] += 1
    return schedule.in_order(orders)


class _Waiting:
    """The passes of a rank that have not begun: forward passes and input gradients in the order of the repeated
    building block, and the stages of the weight gradients in the order of their input gradients."""

    def __init__(self, stages: Sequence[int], starts: Starts, microbatches: int, limit: int, ahead: int) -> None:
        first, second = stages
        later = {F: 0, I: INTERVAL * ahead}
        passes = [
            (start + later[kind] + INTERVAL * number, kind, stage)
            for start, kind, stage in zip(starts, (F, F, I, I), (first, second, second, first))
            for number in range(microbatches)
        ]
        self._passes = [(kind, stage) for _, kind, stage in sorted(passes, key=lambda each: each[0])]
        self._weights: deque[int] = deque()
        self._limit, self._live = limit, 0

    def choose(self, there: Counts, done: Counts) -> tuple[Kind, int] | None:
        """Chooses and removes the next pass (kind, stage); returns None if the rank must idle."""
        at = self._first_able(there, done)
        if at is not None and (self._passes[at][0] is I or self._live < self._limit):
            kind, stage = self._passes.pop(at)
            if kind is F:
                self._live += 1
            else:
                self._weights.append(stage)
            return kind, stage
        if not self._weights:
            return None
        self._live -= 1
        return W, self._weights.popleft()

    def _first_able(self, there: Counts, done: Counts) -> int | None:
        """Returns the index of the first pass that has its input, and that leaves room for the passes before it."""
        seen: set[tuple[Kind, int]] = set()
        # The live activations if the rank has run all weight gradients that it can, and their peak.
        live = peak = self._live - len(self._weights)
        for at, (kind, stage) in enumerate(self._passes):
            if (kind, stage) not in seen:  # otherwise an earlier microbatch comes first
                seen.add((kind, stage))
                if done[kind][stage] < there[kind][stage] and (kind is I or peak < self._limit):
                    return at
                if len(seen) == _PASSES:
                    return None
            live += 1 if kind is F else -1
            peak = max(peak, live)
        return None


V_HALF = BuildingBlock(v_half, lambda ranks: (ranks + 2) // 2)
V_MIN = BuildingBlock(v_min, lambda ranks: (ranks + 4) // 3)
ROWS = tuple(
    ScheduleRow(
        name,
        partial(controllable, name, block),
        placement="v",
        stages=2,
        splits_backward=True,
        recurs=True,
        idle=lambda forward, all_passes: 0.0,
    )
    for name, block in (("v-half", V_HALF), ("v-min", V_MIN))
)
