"""Chooses the next computation of a rank in a message-driven pipeline."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from optimus.errors import UserError
from optimus.pipeline.costs import per_stage
from optimus.pipeline.schedule import Action, Kind, Schedule

Preference = Literal["forward", "backward", "arrival"]


def find_caps(caps: int | Sequence[int] | None, stages: int) -> list[int]:
    """Returns the maximum live activations of each stage; the default is the number of stages (AxoNN's
    `pipeline_limit`).

    Raises `UserError` for a cap below one, or a sequence without one cap per stage.
    """
    limits = per_stage(stages if caps is None else caps, stages, "message-driven pipeline: {} caps")
    if min(limits) < 1:
        raise UserError(f"message-driven pipeline: cap {caps} admits no microbatch; give at least 1 for every stage")
    return limits


def message_driven(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Returns a schedule without actions that maps stage s to rank s mod `ranks`."""
    return Schedule("message-driven", ranks, microbatches, (), stages_per_rank=stages_per_rank)


class _Arrived(NamedTuple):
    time: float
    action: Action


class ReadyQueue:
    """The computations of `rank` that have their input and have not begun. Counts the live activations of each stage.

    `caps` limits the live activations of each stage (see `find_caps`). `prefer` names the passes that come first; with
    "arrival", the computation with the earliest input comes first.
    """

    def __init__(self, schedule: Schedule, rank: int, caps: int | Sequence[int] | None, prefer: Preference) -> None:
        self._caps, self._prefer = find_caps(caps, schedule.stages), prefer
        self._live = dict.fromkeys(schedule.stages_of(rank), 0)
        self._last_stage = schedule.stages - 1
        first = range(schedule.microbatches if 0 in self._live else 0)
        self._arrived = [_Arrived(0.0, Action(Kind.FORWARD, 0, number)) for number in first]

    def arrive(self, action: Action, time: float) -> None:
        """Records that the input of `action` has arrived."""
        self._arrived.append(_Arrived(time, action))

    def choose(self) -> Action | None:
        """Chooses and begins the next action; returns None if no action may begin."""
        able = [
            item
            for item in self._arrived
            if item.action.kind is Kind.BACKWARD or self._live[item.action.stage] < self._caps[item.action.stage]
        ]
        if not able:
            return None
        action = min(able, key=self._order).action
        self.begin(action)
        return action

    def has(self, action: Action) -> bool:
        """True if the input of `action` has arrived and `action` has not begun."""
        return any(item.action == action for item in self._arrived)

    def begin(self, action: Action) -> None:
        """Removes `action` from the queue, and counts the activations of a forward pass as live."""
        self._arrived = [item for item in self._arrived if item.action != action]
        if action.kind is Kind.FORWARD:
            self._live[action.stage] += 1

    def end(self, action: Action) -> Action | None:
        """Ends `action`; returns the action, on any rank, that needs the result, if any."""
        kind, stage, microbatch = action
        if kind is Kind.BACKWARD:
            self._live[stage] -= 1
        following = Action(kind, stage + 1 if kind is Kind.FORWARD else stage - 1, microbatch)
        if kind is Kind.FORWARD and stage == self._last_stage:
            following = Action(Kind.BACKWARD, stage, microbatch)
        return None if following.stage < 0 else following

    def _order(self, item: _Arrived) -> tuple[float, int, int]:
        time, (kind, stage, microbatch) = item
        first = time if self._prefer == "arrival" else float(kind.value != self._prefer)
        return first, -stage, microbatch
