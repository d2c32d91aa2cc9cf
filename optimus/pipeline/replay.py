"""Computes start and end times of computations in a given order. Transfers do not block the ranks."""

from collections.abc import Callable, Sequence

from optimus.errors import UserError
from optimus.pipeline.schedule import Action, Schedule

Interval = tuple[float, float]


class ScheduleError(UserError):
    """Raised for a schedule with missing, repeated, foreign or misplaced actions, or with a deadlock."""


def replay(
    schedule: Schedule, orders: Sequence[Sequence[Action]], duration: Callable[[Action], float], link: float = 0.0
) -> dict[Action, Interval]:
    """Returns (start, end) of every computation.

    An input arrives at the end of the computation that produces the input, or `link` later from another rank.

    Args:
        orders: the computations of each rank, in order.
        duration: the time of a computation, in the unit of `link`.

    Raises `ScheduleError` when a rank waits for a computation that never runs.
    """
    done: dict[Action, Interval] = {}
    position = [0] * schedule.ranks
    free = [0.0] * schedule.ranks
    waiting: dict[Action, list[int]] = {}  # ranks that wait for each action
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        while position[rank] < len(orders[rank]):
            action = orders[rank][position[rank]]
            sources = schedule.inputs_of(action)
            missing = next((source for source in sources if source not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = free[rank]
            for source in sources:
                away = schedule.rank_of(source.stage) != rank
                start = max(start, done[source][1] + (link if away else 0.0))
            free[rank] = start + duration(action)
            done[action] = (start, free[rank])
            position[rank] += 1
            ready += waiting.pop(action, [])
    if waiting:
        rank, source = min((min(ranks), source) for source, ranks in waiting.items())
        stuck = orders[rank][position[rank]]
        raise ScheduleError(f"schedule {schedule.name}: rank {rank} waits at {stuck} for {source}, which never comes")
    return done
