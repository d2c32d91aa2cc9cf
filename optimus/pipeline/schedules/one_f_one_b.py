"""One forward pass, one backward pass, in turns (PipeDream-flush, Narayanan et al. 2021; Megatron-LM, figure 4 top)."""

from collections.abc import Sequence
from itertools import zip_longest

from optimus.errors import UserError
from optimus.pipeline.schedule import Action, Kind, Schedule


def one_f_one_b(ranks: int, microbatches: int, warm_up: float = 1.0, ahead: int = 0) -> Schedule:
    """Stage s keeps the activations of ranks - s microbatches. Bubble: (ranks - 1) / microbatches, as GPipe.

    With `warm_up` c > 1, a stage begins c times as many microbatches, c * (ranks - s) rounded down, before its first
    backward pass, and keeps as many; with `ahead`, so many more. That changes nothing if all times are equal; it hides times
    of links and jitter.

    Raises `UserError` for a warm-up below 1, with which stages would wait for each other in a circle.
    """
    if warm_up < 1:
        raise UserError(f"schedule 1f1b: warm-up {warm_up:g} is too short to fill the pipeline; take at least 1")
    orders = []
    for rank in range(ranks):
        forwards, backwards = (
            [Action(kind, rank, microbatch) for microbatch in range(microbatches)]
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        orders.append(take_turns(forwards, backwards, live=int(warm_up * (ranks - rank)) + ahead))
    return Schedule("1f1b", ranks, microbatches, ()).in_order(orders)


def take_turns(forwards: Sequence[Action], backwards: Sequence[Action], live: int) -> list[Action]:
    """The first `live` - 1 forward passes, then a forward and a backward pass in turns, until both have run out."""
    first = min(live - 1, len(forwards))
    turns = zip_longest(forwards[first:], backwards)
    return [*forwards[:first], *(action for turn in turns for action in turn if action is not None)]
