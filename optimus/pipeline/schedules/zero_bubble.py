"""Backward passes of inputs and of weights as two actions, the second deferred into what would be bubble.

Zero Bubble Pipeline Parallelism, Qi et al. 2023: ZB-H1 (section 2.1) and ZBV (section 6). "I" below is their "B".
"""

from collections.abc import Iterator

from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.schedules.row import Row, Sizes

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS


def zb_h1(sizes: Sizes) -> Schedule:
    """1F1B in which stage s does the weights' part of a microbatch s microbatches after its input's part.

    So every stage keeps at most the activations of `ranks` microbatches, the maximum of 1F1B. If the three times are
    equal and there are at least `ranks` microbatches, the bubble is (ranks - 1) / (3 * microbatches), a third of 1F1B's.
    """
    ranks, microbatches = sizes.ranks, sizes.microbatches

    def order(rank: int) -> Iterator[Action]:
        ahead = ranks - rank - 1  # forward passes before the first turn; then F, I and W in turns
        for turn in range(-ahead, microbatches + rank):
            for kind, microbatch in ((F, turn + ahead), (I, turn), (W, turn - rank)):
                if 0 <= microbatch < microbatches:
                    yield Action(kind, rank, microbatch)

    return Schedule("zb-h1", ranks, microbatches, (), splits_backward=True).in_order(map(order, range(ranks)))


def zbv(sizes: Sizes) -> Schedule:
    """Rank r holds stages r and 2 * ranks - 1 - r, and keeps at most 2 * ranks activations, in bytes the maximum of 1F1B.

    If the three times are equal and there are at least `ranks` microbatches, the bubble is (ranks - 1) / (6 *
    microbatches): what is left is that rank r can begin only when r forward passes are done.

    The order is found by playing equal times: whenever a rank is free, it does the first that can be done of: a forward
    pass, rather of the second stage, if it may keep one more; the input's, then the weights' part of a backward pass of
    the first stage; the same of the second stage. (The paper gives a picture, which is for at least 2 * ranks - 1
    microbatches. Of all orders of preference this is one of the few that reach the bubble above for every number; the
    tests hold it to that.)
    """
    ranks, microbatches = sizes.ranks, sizes.microbatches
    schedule = Schedule("zbv", ranks, microbatches, (), stages_per_rank=2, placement="v", splits_backward=True)
    ends: dict[Action, int] = {}
    next_microbatch = dict.fromkeys(((kind, stage) for kind in (F, I, W) for stage in range(schedule.stages)), 0)
    live = [0] * ranks
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    held = [schedule.stages_of(rank) for rank in range(ranks)]
    now = 0

    def choose(rank: int) -> Action | None:
        first, second = held[rank]
        for kind, stage in ((F, second), (F, first), (I, first), (W, first), (I, second), (W, second)):
            action = Action(kind, stage, next_microbatch[kind, stage])
            source = schedule.input_of(action)
            there = source is None or ends.get(source, now + 1) <= now
            if there and action.microbatch < microbatches and (kind is not F or live[rank] < 2 * ranks):
                return action
        return None

    while len(ends) < 3 * schedule.stages * microbatches:
        for rank in range(ranks):
            action = choose(rank)
            if action is not None:
                ends[action] = now + 1
                next_microbatch[action.kind, action.stage] += 1
                live[rank] += {F: 1, W: -1}.get(action.kind, 0)
                orders[rank].append(action)
        now += 1
    return schedule.in_order(orders)


ROWS = (  # the weights' passes fill the end of a step
    Row("zb-h1", zb_h1, idle=lambda forward, whole: forward, live=lambda sizes, rank: sizes.ranks),
    Row("zbv", zbv, placement="v", stages=2, idle=lambda forward, whole: 0.0),
)
