"""The timeline of a pipeline in which what has arrived decides what is computed next (AxoNN dissertation, algorithm
2)."""

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

from optimus.errors import UserError
from optimus.pipeline.costs import Costs, per_stage
from optimus.pipeline.schedule import Action, Kind, Schedule, partner
from optimus.pipeline.timeline import Event, Timeline

Preference = Literal["forward", "backward", "arrival"]


def caps_like_1f1b(stages: int, factor: float = 1.0) -> list[int]:
    """The most live activations per stage: `factor` times those of 1F1B, stages - s for stage s, rounded down."""
    return [int(factor * (stages - stage)) for stage in range(stages)]


class _Arrived(NamedTuple):
    time: float
    action: Action


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
    schedule = Schedule("message-driven", ranks, microbatches, (), stages_per_rank=stages_per_rank)
    stages = schedule.stages
    if caps is None:
        caps = stages
    limits = [caps] * stages if isinstance(caps, int) else list(caps)
    if len(limits) != stages:
        raise UserError(
            f"message-driven pipeline: {len(limits)} caps for {stages} stages; give one per stage, or one for all"
        )
    if min(limits) < 1:
        raise UserError(f"message-driven pipeline: cap {caps} lets no microbatch in; give at least 1 for every stage")
    costs = costs or Costs()
    return _Run(schedule, costs, limits, prefer).play()


class _Run:
    """State of one simulation."""

    def __init__(self, schedule: Schedule, costs: Costs, caps: Sequence[int], prefer: Preference) -> None:
        self.schedule, self.costs, self.caps, self.prefer = schedule, costs, caps, prefer
        self.duration = costs.durations(schedule.stages, schedule.microbatches)
        first = [_Arrived(0.0, Action(Kind.FORWARD, 0, number)) for number in range(schedule.microbatches)]
        self.arrived: list[list[_Arrived]] = [first, *([] for _ in range(schedule.ranks - 1))]
        self.live = [0] * schedule.stages
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
                    self.arrived[rank].append(_Arrived(now, action))
                else:
                    self._end(rank, now, action)
            for rank in touched:
                self._begin(rank, now)
        stages = self.schedule.stages
        kept = per_stage(self.costs.activation_bytes, stages) if self.costs.activation_bytes else ()
        return Timeline.of(self.events, self.schedule.ranks, kept)

    def _begin(self, rank: int, now: float) -> None:
        if not self.free[rank]:
            return
        able = [item for item in self.arrived[rank] if item.action.kind is Kind.BACKWARD or self._has_room(item.action)]
        if not able:
            return
        chosen = min(able, key=self._order)
        self.arrived[rank].remove(chosen)
        action = chosen.action
        end = now + self.duration(action)
        self.free[rank] = False
        self.events.append(Event(rank, *action, now, end))
        if action.kind is Kind.FORWARD:
            self.live[action.stage] += 1
        heapq.heappush(self.coming, (end, False, rank, action))

    def _has_room(self, action: Action) -> bool:
        return self.live[action.stage] < self.caps[action.stage]

    def _order(self, item: _Arrived) -> tuple[float, int, int]:
        time, (kind, stage, microbatch) = item
        first = time if self.prefer == "arrival" else float(kind.value != self.prefer)
        return first, -stage, microbatch

    def _end(self, rank: int, now: float, action: Action) -> None:
        kind, stage, microbatch = action
        self.free[rank] = True
        if kind is Kind.BACKWARD:
            self.live[stage] -= 1
        following = Action(kind, stage + 1 if kind is Kind.FORWARD else stage - 1, microbatch)
        if kind is Kind.FORWARD and stage == self.schedule.stages - 1:
            following = Action(Kind.BACKWARD, stage, microbatch)
        if following.stage < 0:
            return
        send = self.schedule.send_of(action)
        arrival = now
        if send is not None:
            arrival += self.costs.link
            for half in (send, partner(send)):
                self.events.append(Event(self.schedule.rank_of(half.stage), *half, now, arrival))
        heapq.heappush(self.coming, (arrival, True, self.schedule.rank_of(following.stage), following))
