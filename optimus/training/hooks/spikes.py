"""A hook for loss spikes: the run skips the update, and may go back to earlier weights."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from optimus.errors import UserError
from optimus.resilience.exits import EndedError, Exit
from optimus.training.record import StepRecord
from optimus.training.rollback import go_back
from optimus.training.trainer import Hook, Order, Trainer

WINDOW = 64  # maximum number of previous losses from which the hook computes the limit
LEAST = 16  # minimum number of previous losses for a limit


class Spikes(Hook):
    """Handles spikes: losses more than `resilience.spike` standard deviations above the mean of the latest normal
    losses.

    With `on_spike: rollback`, the hook prepares a restart from earlier saved weights, and raises `EndedError` under
    `optimus launch`, otherwise `UserError`. Without earlier weights, or after `resilience.max_rollbacks` rollbacks, the
    hook only raises `UserError`.

    After more than `resilience.max_skipped` spikes without a normal loss between them, the hook forgets all losses, and
    accepts any loss until the hook has `LEAST` new losses.
    """

    order = Order.JUDGE

    def __init__(self, node: str | None) -> None:
        self._node = node
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [*self._losses], "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses.extend(state["losses"])
        self._in_a_row = state["in_a_row"]

    def loss_limit(self, trainer: Trainer) -> float:
        self._limit = math.inf
        if len(self._losses) >= LEAST and self._in_a_row <= trainer.config.resilience.max_skipped:
            spread = statistics.stdev(self._losses)
            if spread:  # equal losses say nothing about the usual deviation
                self._limit = statistics.mean(self._losses) + trainer.config.resilience.spike * spread
        return self._limit

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        # An overflow is no spike, and its loss says nothing about an update.
        if not record.result.predicted or not math.isfinite(record.result.loss) or record.result.overflow:
            return
        if not record.result.loss > self._limit:
            self._in_a_row = 0
            self._losses.append(record.result.loss)
            return
        self._in_a_row += 1
        if self._in_a_row > trainer.config.resilience.max_skipped:
            self._losses.clear()
        detail = f"the loss {record.result.loss:.4f} is above the spike threshold {self._limit:.4f}"
        trainer.say(f"step {trainer.progress.step}: {detail}; the update was skipped")
        if trainer.config.resilience.on_spike == "rollback":
            detail = f"step {trainer.progress.step}: {detail}"
            back = go_back(trainer, detail)
            if self._node is not None:
                raise EndedError(Exit.DIVERGED, detail)
            raise UserError(f"{detail}. The run is back at the weights of step {back}: run again with `resume=True`")
