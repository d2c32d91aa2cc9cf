"""A hook that reports extremely large gradients."""

from optimus.training.record import StepRecord
from optimus.training.step import LARGEST_NORM
from optimus.training.trainer import Hook, Order, Trainer


class HugeGradients(Hook):
    """Reports finite gradients that are too large for an update, or large enough to affect second moments for many
    steps."""

    order = Order.RECORD
    ranks = "first"

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if not record.result.huge:
            return
        if record.result.clipped_norm > LARGEST_NORM:
            what = "have squares beyond the range of fp32: the update was skipped"
        elif record.result.skipped:
            what = "were not applied, because the loss was too high or not finite"
        else:
            what = "were applied: large second moments will keep the updates of many steps small"
        cure = "optimizer.clip_during_warmup=true clips such gradients, `optimus rollback` returns to an earlier step"
        trainer.say(
            f"step {trainer.progress.step}: gradients with a norm of {record.result.clipped_norm:.3g} {what} ({cure})"
        )
