"""Simulates a message-driven pipeline (AxoNN dissertation, algorithm 2)."""

import heapq
from collections.abc import Sequence

from optimus.pipeline.costs import Costs
from optimus.pipeline.ready import Preference, ReadyQueue, message_driven
from optimus.pipeline.schedule import Action, partner
from optimus.pipeline.timeline import Event, Timeline


def simulate_message_driven(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    caps: int | Sequence[int] | None = None,
    prefer: Preference = "forward",
    stages_per_rank: int = 1,
) -> Timeline:
    """Simulates a pipeline in which each idle rank runs a pass whose input has arrived.

    See `ReadyQueue` for `caps` and `prefer`. By default a forward pass takes 1, a backward pass 2, and a message no
    time. The function ignores `costs.blocking`. Stage s is on rank s mod `ranks`.
    """
    schedule, costs = message_driven(ranks, microbatches, stages_per_rank), costs or Costs()
    duration = costs.durations(schedule)
    ready = [ReadyQueue(schedule, rank, caps, prefer) for rank in range(ranks)]
    free = [True] * ranks
    events: list[Event] = []
    # (time, arrives, rank, action): if `arrives`, the input of `action` arrives on the rank; else `action` ends there
    coming: list[tuple[float, bool, int, Action]] = []

    def begin(rank: int, now: float) -> None:
        action = ready[rank].choose() if free[rank] else None
        if action is not None:
            end = now + duration(action)
            free[rank] = False
            events.append(Event(rank, *action, now, end))
            heapq.heappush(coming, (end, False, rank, action))

    def finish(rank: int, now: float, action: Action) -> None:
        free[rank] = True
        following, send, arrival = ready[rank].end(action), schedule.send_of(action), now
        if following is None:
            return
        if send is not None:
            arrival += costs.link
            events.extend(Event(schedule.rank_of(half.stage), *half, now, arrival) for half in (send, partner(send)))
        heapq.heappush(coming, (arrival, True, schedule.rank_of(following.stage), following))

    begin(0, 0.0)
    while coming:
        now = coming[0][0]
        touched = set()
        while coming and coming[0][0] == now:
            _, arrives, rank, action = heapq.heappop(coming)
            touched.add(rank)
            if arrives:
                ready[rank].arrive(action, now)
            else:
                finish(rank, now, action)
        for rank in touched:
            begin(rank, now)
    return Timeline.from_events(events, ranks)
