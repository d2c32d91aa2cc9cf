"""Simulates the timeline of a schedule under a cost model."""

from itertools import groupby

from optimus.pipeline.costs import Costs
from optimus.pipeline.replay import Interval, ScheduleError, replay
from optimus.pipeline.schedule import Action, Schedule, partner
from optimus.pipeline.timeline import Event, Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Returns the timeline of all actions of a schedule that `check` has proved correct.

    By default a forward pass and each of the two parts of a backward pass take 1, and links take no time.

    Raises `UserError` when costs per stage do not have one number per stage.
    """
    costs = costs or Costs()
    times = (_blocking if costs.blocking else _overlapping)(schedule, costs)
    return Timeline.from_events(
        (Event(rank, *action, *times[action]) for rank, actions in enumerate(schedule.actions) for action in actions),
        schedule.ranks,
    )


def _overlapping(schedule: Schedule, costs: Costs) -> dict[Action, Interval]:
    """Simulates transfers that begin when the computation of their content ends, and that never delay a computation on their
    ranks."""
    times = _computations(schedule, costs)
    for action, (_, end) in list(times.items()):
        send = schedule.send_of(action)
        if send is not None:
            times[send] = times[partner(send)] = (end, end + costs.link)
    return times


def _computations(schedule: Schedule, costs: Costs) -> dict[Action, Interval]:
    orders = [[action for action in actions if action.kind.computes] for actions in schedule.actions]
    return replay(schedule, orders, costs.durations(schedule.stages, schedule.microbatches), costs.link)


def _blocking(schedule: Schedule, costs: Costs) -> dict[Action, Interval]:
    """Simulates ranks that post adjacent transfers together and wait until the last of these transfers ends. A transfer
    begins when its sender and its receiver have posted the transfer."""
    # For each rank, its actions in alternating runs of computations and of transfers.
    runs = [
        (list(run) for _, run in groupby(actions, lambda action: action.kind.computes)) for actions in schedule.actions
    ]
    duration = costs.durations(schedule.stages, schedule.microbatches)
    batches: list[list[Action]] = [[] for _ in runs]  # actions that each rank waits for
    posted: dict[Action, float] = {}
    times: dict[Action, Interval] = {}
    now = [0.0] * schedule.ranks
    ready = set(range(schedule.ranks))

    while ready:
        rank = ready.pop()
        while all(action in times for action in batches[rank]):
            now[rank] = max([now[rank], *(times[action][1] for action in batches[rank])])
            batches[rank] = next(runs[rank], [])
            if not batches[rank]:
                break
            for action in batches[rank]:
                other = None if action.kind.computes else partner(action)
                if other is None:
                    times[action] = (now[rank], now[rank] + duration(action))
                    now[rank] = times[action][1]
                elif other in posted:
                    start = max(posted.pop(other), now[rank])
                    times[action] = times[other] = (start, start + costs.link)
                    ready.add(schedule.peer(action))
                else:
                    posted[action] = now[rank]
    for rank, batch in enumerate(batches):
        if batch:
            raise ScheduleError(
                f"schedule {schedule.name}: deadlock: rank {rank} waits at {batch[0]}; `check` names the cause"
            )
    return times


def makespan(schedule: Schedule, costs: Costs) -> float:
    """Returns the makespan of the timeline of `simulate` without making the whole timeline. Raises the errors of
    `simulate`."""
    times = (_blocking if costs.blocking else _computations)(schedule, costs)
    return max(end for _, end in times.values())
