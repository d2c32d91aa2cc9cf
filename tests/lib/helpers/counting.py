"""A hook as users write it, named in a configuration."""

from collections.abc import Mapping
from typing import Any

import optimus


class Counting(optimus.Hook):
    """Counts the steps of a run, across all its processes."""

    def __init__(self) -> None:
        self.steps = 0

    def after_step(self, trainer: optimus.Trainer, record: optimus.StepRecord) -> None:
        self.steps += 1
        record.values["counted"] = float(self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
