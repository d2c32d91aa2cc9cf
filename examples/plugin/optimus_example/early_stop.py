"""A hook that ends a run whose loss no longer falls."""

import math
from typing import Any

import optimus
from optimus.extend import HookRow


class EarlyStop(optimus.Hook):
    """Stops the run when no loss of the last 100 steps is below the least loss before them."""

    patience = 100

    def __init__(self) -> None:
        self.least, self.at = math.inf, 0

    def after_step(self, trainer: Any, record: Any) -> None:
        if record.result.loss < self.least:
            self.least, self.at = record.result.loss, record.step
        elif record.step - self.at >= self.patience:
            trainer.stop(f"the loss has not fallen for {self.patience} steps")

    def state_dict(self) -> dict[str, Any]:
        return {"least": self.least, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.least, self.at = state["least"], state["at"]


EARLY_STOP = HookRow("early-stop", EarlyStop)
