"""Ends a run after too many consecutive steps with a loss or gradients unfit for an update."""

import math

from optimus.errors import UserError
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class NonFinite(Hook):
    """Ends the run after more than `resilience.max_skipped` consecutive steps whose loss or gradients are unfit for an
    update (`StepResult.unfit`)."""

    order = Order.LAST

    def __init__(self) -> None:
        self._in_a_row = 0

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._in_a_row = self._in_a_row + 1 if record.result.unfit else 0
        if self._in_a_row > trainer.config.resilience.max_skipped:
            what = "has no finite square in fp32" if record.result.huge else "is not finite"
            if trainer.progress.loss_scale is not None and math.isfinite(record.result.loss) and not record.result.huge:
                what += (
                    " at the smallest loss scale (train.loss_scale.minimum is "
                    f"{trainer.config.train.loss_scale.minimum:g}: lower it, or choose another train.precision)"
                )
            if trainer.state.steps or record.result.huge:
                cure = "Lower lr_schedule.lr or set optimizer.clip_during_warmup=true, then run with `resume=True`"
            else:
                cure = (
                    "These are still the first weights, so no learning rate is at fault: look at checkpoint.load_path, "
                    "model, train.loss and train.precision, then begin anew with another train.output"
                )
            error = UserError(
                f"step {record.step}: loss {record.result.loss} or gradient norm {record.result.grad_norm} {what}, for "
                f"{self._in_a_row} steps in a row (resilience.max_skipped is {trainer.config.resilience.max_skipped}). None "
                f"of their updates was applied. {cure}"
            )
            trainer.fail(error)
