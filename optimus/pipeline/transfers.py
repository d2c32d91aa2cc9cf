"""Adds sends and receives to an order of computations, so that the ranks cannot deadlock."""

from optimus.pipeline.costs import Costs
from optimus.pipeline.replay import replay
from optimus.pipeline.schedule import Action, Schedule, partner

USUAL = Costs(logits=0.25)  # typical relative times


def with_transfers(schedule: Schedule) -> Schedule:
    """Returns a copy of `schedule` with the sends and receives between ranks.

    `schedule` must contain only computations.
    The lists of all ranks follow one global order of events, so no deadlock is possible.
    """
    times = replay(schedule, schedule.actions, USUAL.durations(schedule))
    events: list[tuple[float, bool, Action]] = []  # (time, computes, action); a send also stands for its receive
    for action, (start, end) in times.items():
        events.append((start, True, action))
        send = schedule.send_of(action)
        if send is not None:
            events.append((end, False, send))
    actions: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for _, computes, action in sorted(events):
        actions[schedule.rank_of(action.stage)].append(action)
        if not computes:
            actions[schedule.peer(action)].append(partner(action))
    return schedule.in_order(actions)
