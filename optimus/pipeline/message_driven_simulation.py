"""The timeline of a pipeline in which what has arrived decides what is computed next (AxoNN dissertation, algorithm
2)."""

import heapq
from collections.abc import Sequence

from optimus.pipeline.costs import Costs
from optimus.pipeline.ready import Preference, Ready, message_driven
from optimus.pipeline.schedule import Action, Schedule, partner
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
    """Whenever a rank is free, it does the forward or backward pass whose input has arrived; of several, the preferred.

    Args:
        costs: default: F = I = W = 1; backward passes are not split, and transfers never block (`costs.blocking` is not
            used).
        caps: the most live activations of each stage. One number for all is the dissertation's `pipeline_limit`: as many
            microbatches are in the pipeline at once. Default: the number of stages, as there.
        prefer: forward: a forward pass as long as its stage is below its cap; backward: a backward pass; arrival: what
            came first.
        stages_per_rank: stage s is on rank s mod ranks; of several stages the last that can go on does.

    Raises `UserError` for a cap below one and for costs or caps that do not fit the stages.
    """
    schedule = message_driven(ranks, microbatches, stages_per_rank)
    return _Run(schedule, costs or Costs(), caps, prefer).play()


class _Run:
    """State of one simulation."""

    def __init__(self, schedule: Schedule, costs: Costs, caps: int | Sequence[int] | None, prefer: Preference) -> None:
        self.schedule, self.costs = schedule, costs
        self.duration = costs.durations(schedule.stages, schedule.microbatches)
        self.ready = [Ready(schedule, rank, caps, prefer) for rank in range(schedule.ranks)]
        self.free = [True] * schedule.ranks
        self.events: list[Event] = []
        # (time, arrives, rank, what): the end of a computation on the rank, or the arrival of the input of one.
        self.coming: list[tuple[float, bool, int, Action]] = []

    def play(self) -> Timeline:
        self._begin(0, 0.0)
        while self.coming:
            now = self.coming[0][0]
            touched = set()
            while self.coming and self.coming[0][0] == now:
                _, arrives, rank, action = heapq.heappop(self.coming)
                touched.add(rank)
                if arrives:
                    self.ready[rank].arrive(action, now)
                else:
                    self._end(rank, now, action)
            for rank in touched:
                self._begin(rank, now)
        return Timeline.of(self.events, self.schedule.ranks)

    def _begin(self, rank: int, now: float) -> None:
        action = self.ready[rank].choose() if self.free[rank] else None
        if action is None:
            return
        end = now + self.duration(action)
        self.free[rank] = False
        self.events.append(Event(rank, *action, now, end))
        heapq.heappush(self.coming, (end, False, rank, action))

    def _end(self, rank: int, now: float, action: Action) -> None:
        self.free[rank] = True
        following = self.ready[rank].end(action)
        if following is None:
            return
        send = self.schedule.send_of(action)
        arrival = now
        if send is not None:
            arrival += self.costs.link
            for half in (send, partner(send)):
                self.events.append(Event(self.schedule.rank_of(half.stage), *half, now, arrival))
        heapq.heappush(self.coming, (arrival, True, self.schedule.rank_of(following.stage), following))
