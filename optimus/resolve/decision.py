"""A choice that is taken for the user, and what it leaves: a line for each key."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Decision(NamedTuple):
    """A key that was left open, its value, and why. A run that is resumed keeps those that are `kept`, which are part of
    it; the others are of the machine, and are taken anew at each start. One that could not be another is not `said`."""

    key: str
    value: Any
    why: str
    kept: bool = False
    said: bool = True

    @property
    def written(self) -> dict[str, Any]:
        """As a run folder has it."""
        return {"key": self.key, "value": self.value, "why": self.why, "kept": self.kept}

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.why})"


class Decided(NamedTuple):
    """Values by the path of their key, and why; none where nothing was open. What is None was said in another way."""

    values: Mapping[str, Any] = {}
    why: str = ""
    kept: bool = False
    said: bool = True

    @property
    def decisions(self) -> list[Decision]:
        """A line for each value."""
        return [
            Decision(key, value, self.why, self.kept, self.said)
            for key, value in self.values.items()
            if value is not None
        ]
