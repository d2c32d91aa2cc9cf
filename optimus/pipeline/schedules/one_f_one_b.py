"""Alternates one forward and one backward pass (PipeDream-flush, Narayanan et al. 2021; Megatron-LM, figure 4 top)."""

from collections.abc import Sequence
from itertools import zip_longest

from optimus.errors import UserError
from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.schedules.row import ScheduleRow, Sizes


def one_f_one_b(sizes: Sizes) -> Schedule:
    """Makes the 1F1B schedule. By default, stage s saves the activations of at most `ranks - s` microbatches.

    If stages take equal times and messages no time, the bubble is (ranks - 1) / microbatches of the compute
    time. A `warmup_factor` multiplies the number of microbatches with saved activations, and `ahead` adds to this
    number.

    Raises `UserError` for a `warmup_factor` below 1.
    """
    if sizes.warmup_factor < 1:
        raise UserError(
            f"schedule 1f1b: warm-up factor {sizes.warmup_factor:g} is too small to fill the pipeline; use at least 1"
        )
    orders = []
    for rank in range(sizes.ranks):
        forwards, backwards = (
            [Action(kind, rank, microbatch) for microbatch in range(sizes.microbatches)]
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        orders.append(take_turns(forwards, backwards, _live(sizes, rank)))
    return Schedule("1f1b", sizes.ranks, sizes.microbatches, ()).in_order(orders)


def take_turns(forwards: Sequence[Action], backwards: Sequence[Action], live: int) -> list[Action]:
    """Orders the passes: first `live` - 1 forward passes, then alternately one forward and one backward pass, and last
    the remaining backward passes."""
    first = min(live - 1, len(forwards))
    turns = zip_longest(forwards[first:], backwards)
    return [*forwards[:first], *(action for turn in turns for action in turn if action is not None)]


def _live(sizes: Sizes, rank: int) -> int:
    return int(sizes.warmup_factor * (sizes.ranks - rank)) + sizes.ahead


ROWS = (ScheduleRow("1f1b", one_f_one_b, deepens=True, live=_live),)
