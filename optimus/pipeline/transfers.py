"""Sends and receives added to an order of computations, so that they cannot deadlock."""

from optimus.pipeline.costs import Costs
from optimus.pipeline.replay import replay
from optimus.pipeline.schedule import Action, Schedule, partner

USUAL = Costs(logits=0.25)  # a usual relation of times, which decides which of several safe places a transfer gets


def with_transfers(schedule: Schedule) -> Schedule:
    """A schedule of computations alone, with the sends and receives between ranks put among them.

    The computations are played with usual times. A transfer happens, as one event, when the computation that makes its
    content ends; at the same moment, transfers come before computations that begin. Sorted by time, all events form
    one global order, and the actions of a rank are those of its events. The earliest event not yet done can always
    happen: hence no deadlock, even if a send lasts until its receive is reached. A transfer that reaches a busy rank
    stands after what the rank is computing.

    In the steady state of 1F1B the forward send and the backward receive between two neighbours fall together, and so
    stand together.

    Raises `ScheduleError` when ranks wait for each other in a circle.
    """
    times = replay(schedule, schedule.actions, USUAL.durations(schedule.stages, schedule.microbatches))
    events: list[tuple[float, bool, Action]] = []  # a transfer is named by its send
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
