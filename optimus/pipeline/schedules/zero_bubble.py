"""Schedules with two actions per backward pass: the gradient of the input, and the gradients of the weights.

Source: Zero Bubble Pipeline Parallelism, Qi et al. 2023: ZB-H1 (section 2.1) and ZBV (section 6). "I" below is the
paper's "B".
"""

from collections.abc import Iterator, Sequence

from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.schedules.row import ScheduleRow, Sizes

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS


def zb_h1(sizes: Sizes) -> Schedule:
    """Makes ZB-H1, which is 1F1B with deferred weight gradients.

    Every stage saves the activations of at most `ranks` microbatches. If the three passes take equal times, messages
    take no time and there are at least `ranks` microbatches, the bubble is (ranks - 1) / (3 * microbatches).
    """
    ranks, microbatches = sizes.ranks, sizes.microbatches

    def order(rank: int) -> Iterator[Action]:
        ahead = ranks - rank - 1  # number of turns with forward passes alone
        for turn in range(-ahead, microbatches + rank):
            for kind, microbatch in ((F, turn + ahead), (I, turn), (W, turn - rank)):
                if 0 <= microbatch < microbatches:
                    yield Action(kind, rank, microbatch)

    return Schedule("zb-h1", ranks, microbatches, (), splits_backward=True).in_order(map(order, range(ranks)))


def zbv(sizes: Sizes) -> Schedule:
    """Makes ZBV: rank r has stages r and 2 * ranks - 1 - r.

    A rank has at most 2 * ranks live activations, each of one stage and one microbatch. If the three passes take equal
    times, messages take no time and there are at least `ranks` microbatches, the bubble is (ranks - 1) / (6 *
    microbatches).

    The order comes from a simulation with equal times; the paper shows the order only in a picture.
    """
    ranks, microbatches = sizes.ranks, sizes.microbatches
    schedule = Schedule("zbv", ranks, microbatches, (), stages_per_rank=2, placement="v", splits_backward=True)
    last = schedule.stages - 1
    # Number of finished microbatches of each stage, by pass.
    done = {kind: [0] * schedule.stages for kind in (F, I, W)}
    forward, backward, weights = done.values()
    live = [0] * ranks
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    held = [schedule.stages_of(rank) for rank in range(ranks)]

    def choose(rank: int, forward_there: Sequence[int], backward_there: Sequence[int]) -> tuple[Kind, int] | None:
        first, second = held[rank]
        if live[rank] < 2 * ranks:
            if forward[second] < forward_there[second - 1]:
                return F, second
            if forward[first] < (forward_there[first - 1] if first else microbatches):
                return F, first
        if backward[first] < backward_there[first + 1]:
            return I, first
        if weights[first] < backward[first]:
            return W, first
        if backward[second] < (forward_there[second] if second == last else backward_there[second + 1]):
            return I, second
        return (W, second) if weights[second] < backward[second] else None

    while sum(weights) < schedule.stages * microbatches:
        # The counts at the beginning of the turn, for all ranks.
        there = forward.copy(), backward.copy()
        for rank in range(ranks):
            if (chosen := choose(rank, *there)) is not None:
                kind, stage = chosen
                orders[rank].append(Action(kind, stage, done[kind][stage]))
                done[kind][stage] += 1
                live[rank] += {F: 1, W: -1}.get(kind, 0)
    return schedule.in_order(orders)


ROWS = (
    ScheduleRow("zb-h1", zb_h1, splits_backward=True, idle=lambda forward, all_passes: forward),
    ScheduleRow("zbv", zbv, placement="v", stages=2, splits_backward=True, idle=lambda forward, all_passes: 0.0),
)
