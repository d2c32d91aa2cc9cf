"""The decisions on options that a configuration leaves to the library."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Decision(NamedTuple):
    """A decision on an option that the configuration leaves to the library.

    The configuration in the run folder has the value of a `persistent` decision. `said` is True if the summary of a run
    shows the decision.
    """

    key: str
    value: Any
    why: str
    persistent: bool = False
    said: bool = True

    @property
    def written(self) -> dict[str, Any]:
        """The mapping that a run folder stores for the decision."""
        return {"key": self.key, "value": self.value, "why": self.why, "kept": self.persistent}

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.why})"


class Decided(NamedTuple):
    """The decided values by key, and the reason.

    A value of None clears a key that another decided key replaces.
    """

    values: Mapping[str, Any] = {}
    why: str = ""
    persistent: bool = False
    said: bool = True

    @property
    def decisions(self) -> list[Decision]:
        """A decision for each value that is not None."""
        return [
            Decision(key, value, self.why, self.persistent, self.said)
            for key, value in self.values.items()
            if value is not None
        ]
