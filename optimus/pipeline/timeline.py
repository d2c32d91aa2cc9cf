"""Describes, writes and reads simulated and measured timelines of a pipeline."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from optimus.disk import parse_json, user_path, write_json
from optimus.errors import UserError
from optimus.pipeline.schedule import Kind, live_changes


class Event(NamedTuple):
    """An action with its times, in the unit of its timeline."""

    rank: int
    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one step. A simulated send and its receive have the times of the message."""

    ranks: int
    events: tuple[Event, ...]

    @classmethod
    def from_events(cls, events: Iterable[Event], ranks: int) -> "Timeline":
        """Makes a timeline from events in any order. The first event begins at time zero."""
        ordered = sorted(events, key=lambda event: (event.start, event.end))
        zero = ordered[0].start if ordered else 0.0
        if zero:
            ordered = [event._replace(start=event.start - zero, end=event.end - zero) for event in ordered]
        return cls(ranks, tuple(ordered))

    @cached_property
    def computations(self) -> list[list[Event]]:
        """The computations of each rank, in the order of their starts."""
        found: list[list[Event]] = [[] for _ in range(self.ranks)]
        for event in self.events:
            if event.kind.computes:
                found[event.rank].append(event)
        return found

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages that each rank computes, in ascending order."""
        return [sorted({event.stage for event in events}) for events in self.computations]

    @property
    def makespan(self) -> float:
        """The time at which the last event ends."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def busy(self) -> list[float]:
        """The computing time of each rank."""
        return [sum(event.end - event.start for event in events) for events in self.computations]

    @property
    def bubbles(self) -> list[float]:
        """The bubble of each rank: (makespan - computing time) / computing time; infinite without computing time."""
        return [(self.makespan - busy) / busy if busy else float("inf") for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The idle time of all ranks divided by their computing time; infinite without computing time."""
        busy = sum(self.busy)
        return (self.ranks * self.makespan - busy) / busy if busy else float("inf")

    @property
    def peak_activations(self) -> list[int]:
        """The peak number of live activations of each rank, in activations of one microbatch on one stage."""
        return [
            max(accumulate(change for _, change in live_changes(events)), default=0) for events in self.computations
        ]


def write_timeline(path: Path, timeline: Timeline, simulated: Timeline | None = None) -> None:
    """Writes `{"ranks": n, "events": [[rank, kind, stage, microbatch, start, end], ...]}`.

    The events of `simulated`, if given, are under the key `simulated`.
    """
    beside = {} if simulated is None else {"simulated": simulated.events}
    write_json(path, {"ranks": timeline.ranks, "events": timeline.events, **beside})


def read_timeline(path: Path) -> Timeline:
    """Reads a timeline, without its simulated events.

    Raises `UserError` when the file cannot be read or contains no valid timeline.
    """
    path = user_path(path)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        events = [
            Event(int(rank), Kind(kind), int(stage), int(microbatch), float(start), float(end))
            for rank, kind, stage, microbatch, start, end in content["events"]
        ]
        ranks = int(content["ranks"])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        form = '{"ranks": n, "events": [[rank, kind, stage, microbatch, start, end], ...]}'
        raise UserError(f"{path} holds no timeline ({error}); a timeline is JSON of the form {form}") from error
    for event in events:
        if not 0 <= event.rank < ranks:
            raise UserError(
                f"{path}: {event} has a rank outside 0 to {ranks - 1}; correct its rank or the number of ranks"
            )
        if not (math.isfinite(event.start) and math.isfinite(event.end)):
            raise UserError(f"{path}: {event} has a time that is not finite; correct its start or end")
    return Timeline.from_events(events, ranks)
