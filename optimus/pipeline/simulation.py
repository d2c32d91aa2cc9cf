"""Simulates the timeline of a schedule under a cost model."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from optimus.pipeline.costs import Costs
from optimus.pipeline.replay import Interval, ScheduleError, replay
from optimus.pipeline.schedule import Action, Schedule, partner
from optimus.pipeline.timeline import Event, Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Returns the timeline of `schedule`, which must pass `check`.

    By default, a forward pass takes 1, a backward pass takes 2, and links and vocabulary passes take no time.
    """
    costs = costs or Costs()
    times = (_blocking if costs.blocking else _overlapping)(schedule, costs)
    return Timeline.from_events(
        (Event(rank, *action, *times[action]) for rank, actions in enumerate(schedule.actions) for action in actions),
        schedule.ranks,
    )


def _overlapping(schedule: Schedule, costs: Costs) -> dict[Action, Interval]:
    times = _computations(schedule, costs)
    for action, (_, end) in list(times.items()):
        send = schedule.send_of(action)
        if send is not None:
            times[send] = times[partner(send)] = (end, end + costs.link)
    return times


def _computations(schedule: Schedule, costs: Costs) -> dict[Action, Interval]:
    orders = [[action for action in actions if action.kind.computes] for actions in schedule.actions]
    return replay(schedule, orders, costs.durations(schedule), costs.link)


def _blocking(schedule: Schedule, costs: Costs) -> dict[Action, Interval]:
    """Simulates ranks that post adjacent transfers together and wait until the last of these transfers ends. A transfer
    begins when both of its ranks have posted the transfer."""
    steps = [_steps(schedule, actions) for actions in schedule.actions]
    duration = costs.durations(schedule)
    awaited: list[list[Action]] = [[] for _ in steps]  # actions that each rank waits for
    waiting: dict[Action, set[int]] = {}  # computation -> ranks that wait for it
    posted: dict[Action, float] = {}
    times: dict[Action, Interval] = {}
    now = [0.0] * schedule.ranks
    ready = set(range(schedule.ranks))

    def arrival(action: Action, rank: int) -> float:
        away = action.kind.computes and schedule.rank_of(action.stage) != rank
        return times[action][1] + (costs.link if away else 0.0)

    while ready:
        rank = ready.pop()
        while all(action in times for action in awaited[rank]):
            now[rank] = max([now[rank], *(arrival(action, rank) for action in awaited[rank])])
            begun, awaited[rank] = next(steps[rank], ([], []))
            if not (begun or awaited[rank]):
                break
            for action in begun:
                other = None if action.kind.computes else partner(action)
                if other is None:
                    times[action] = (now[rank], now[rank] + duration(action))
                    now[rank] = times[action][1]
                    ready |= waiting.pop(action, set())
                elif other in posted:
                    start = max(posted.pop(other), now[rank])
                    times[action] = times[other] = (start, start + costs.link)
                    ready.add(schedule.peer(action))
                else:
                    posted[action] = now[rank]
            for action in awaited[rank]:
                if action.kind.computes and action not in times:
                    waiting.setdefault(action, set()).add(rank)
    for rank, actions in enumerate(awaited):
        if actions:
            raise ScheduleError(
                f"schedule {schedule.name}: deadlock: rank {rank} waits at {actions[0]}; `check` names the cause"
            )
    return times


def _steps(schedule: Schedule, actions: Iterable[Action]) -> Iterator[tuple[list[Action], list[Action]]]:
    """Yields a rank's steps: (actions that the rank begins, actions that the rank then waits for)."""
    for computes, run in groupby(actions, lambda action: action.kind.computes):
        if not computes:
            transfers = list(run)
            yield transfers, transfers
            continue
        begun: list[Action] = []
        for action in run:
            if inputs := schedule.inputs_of(action):
                yield begun, inputs
                begun = []
            begun.append(action)
        yield begun, []


def makespan(schedule: Schedule, costs: Costs) -> float:
    """Returns the time when the timeline of `simulate` ends, 0 for a schedule without actions."""
    times = (_blocking if costs.blocking else _computations)(schedule, costs)
    return max((end for _, end in times.values()), default=0.0)
