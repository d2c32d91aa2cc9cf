"""Choices made for the user, and the record of each decided key."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Decision(NamedTuple):
    """A key that was left open, its value, and the reason.

    A resumed run keeps the decisions that are `kept`, because they are part of the run. The others depend on the machine and
    are made anew at each start. Decisions without an alternative are not `said`.
    """

    key: str
    value: Any
    why: str
    kept: bool = False
    said: bool = True

    @property
    def written(self) -> dict[str, Any]:
        """The decision as saved in a run folder."""
        return {"key": self.key, "value": self.value, "why": self.why, "kept": self.kept}

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.why})"


class Decided(NamedTuple):
    """Decided values by the path of their key, and the reason; no values if nothing was open.

    A value of None clears a key whose meaning another key now holds.
    """

    values: Mapping[str, Any] = {}
    why: str = ""
    kept: bool = False
    said: bool = True

    @property
    def decisions(self) -> list[Decision]:
        """A decision for each value that is not None."""
        return [
            Decision(key, value, self.why, self.kept, self.said)
            for key, value in self.values.items()
            if value is not None
        ]
