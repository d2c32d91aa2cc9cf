"""What a run does about a step whose loss is far above those before it: nothing, leave its update out, or go back."""

import math
import statistics
from collections import deque

from optimus.errors import UserError
from optimus.resilience.exits import EndedError, Exit
from optimus.training.going_back import go_back
from optimus.training.hooks import Hook
from optimus.training.run import Run
from optimus.training.step import StepResult

WINDOW = 64  # steps that the next is compared with
LEAST = 16  # of them, before which nothing counts as a spike


class Spikes(Hook):
    """A spike is a loss `resilience.spike` standard deviations above the mean of the steps before.

    The update of that step is always left out. With `on_spike: rollback` the run then goes back to weights that it has
    kept. Should the loss stay up for more than `resilience.max_skipped` steps, it is taken for what it is.
    """

    def __init__(self, node: str | None) -> None:
        self._node = node
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    def before_step(self, run: Run) -> None:
        run.loss_limit = math.inf
        if len(self._losses) >= LEAST and self._in_a_row <= run.config.resilience.max_skipped:
            spread = statistics.stdev(self._losses)
            run.loss_limit = statistics.mean(self._losses) + run.config.resilience.spike * spread

    def after_step(self, run: Run, result: StepResult) -> None:
        if not math.isfinite(result.loss):
            return
        if not result.loss > run.loss_limit:
            self._in_a_row = 0
            self._losses.append(result.loss)
            return
        self._in_a_row += 1
        if self._in_a_row > run.config.resilience.max_skipped:
            self._losses.clear()
        detail = f"the loss {result.loss:.4f} is above {run.loss_limit:.4f}, as the steps before let expect"
        run.notes.append(f"step {run.step}: {detail}; its update was left out")
        if run.config.resilience.on_spike == "rollback":
            detail = f"step {run.step}: {detail}"
            back = go_back(run, detail)
            if self._node is not None:
                raise EndedError(Exit.DIVERGED, detail)
            raise UserError(f"{detail}. Gone back to the weights of step {back}: run again with `resume=True`")
