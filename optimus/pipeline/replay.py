"""When computations in a given order begin and end, if transfers do not keep a rank from computing."""

from collections.abc import Callable, Sequence

from optimus.errors import UserError
from optimus.pipeline.schedule import Action, Schedule

Interval = tuple[float, float]


class ScheduleError(UserError):
    """A schedule that cannot be right. The message names the rank and the action."""


def replay(
    schedule: Schedule, orders: Sequence[Sequence[Action]], duration: Callable[[Action], float], link: float = 0.0
) -> dict[Action, Interval]:
    """(start, end) of every computation.

    A computation begins when the one before it on its rank has ended and its input is there: at the end of the
    computation that made it, and `link` later if that was on another rank.

    Args:
        orders: the computations of each rank, in order.
        duration: of a computation, in the unit of `link`.

    Raises `ScheduleError` when ranks wait for each other in a circle.
    """
    done: dict[Action, Interval] = {}
    position = [0] * schedule.ranks
    free = [0.0] * schedule.ranks
    waiting: dict[Action, int] = {}  # what a rank waits for -> the rank
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        while position[rank] < len(orders[rank]):
            action = orders[rank][position[rank]]
            source = schedule.input_of(action)
            if source is not None and source not in done:
                waiting[source] = rank
                break
            start = free[rank]
            if source is not None:
                away = schedule.rank_of(source.stage) != rank
                start = max(start, done[source][1] + (link if away else 0.0))
            free[rank] = start + duration(action)
            done[action] = (start, free[rank])
            position[rank] += 1
            if action in waiting:
                ready.append(waiting.pop(action))
    if waiting:
        rank, source = min((rank, source) for source, rank in waiting.items())
        stuck = orders[rank][position[rank]]
        raise ScheduleError(f"schedule {schedule.name}: rank {rank} waits at {stuck} for {source}, which never comes")
    return done
