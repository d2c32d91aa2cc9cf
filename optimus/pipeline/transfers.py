"""Adds sends and receives to an order of computations, so that the ranks cannot deadlock."""

from optimus.pipeline.costs import Costs
from optimus.pipeline.replay import replay
from optimus.pipeline.schedule import Action, Schedule, partner

USUAL = Costs(logits=0.25)  # typical relative times, which choose among several safe positions of a transfer


def with_transfers(schedule: Schedule) -> Schedule:
    """Returns a copy of `schedule`, which has computations alone, with the sends and receives between ranks.

    The function simulates the computations with the times `USUAL`. A transfer is one event at the end of the
    computation that produces its content. Among simultaneous events, transfers come before computations that begin.
    Sorted by time, all events form one global order, and each rank's list consists of its events in this order. The
    earliest remaining event can always happen. Therefore no deadlock is possible, even if a send lasts until the
    receiving rank reaches the receive. A transfer to a busy rank comes after the rank's current computation.

    Raises `ScheduleError` when a rank waits for a computation that never runs.
    """
    times = replay(schedule, schedule.actions, USUAL.durations(schedule.stages, schedule.microbatches))
    events: list[tuple[float, bool, Action]] = []  # the send stands for the whole transfer
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
