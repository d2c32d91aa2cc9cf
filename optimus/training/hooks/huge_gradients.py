"""A hook that reports extremely large gradients."""

from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class HugeGradients(Hook):
    """Reports gradients that are too large for an update, or so large that they affect second moments for many steps. Runs
    on rank 0."""

    order = Order.RECORD
    ranks = "first"

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if not record.result.huge:
            return
        if record.result.unfit:
            what = "squares that do not fit fp32: its update was left out"
        else:
            what = "been applied: second moments remember them, and updates will be small for many steps"
        cure = "optimizer.clip_during_warmup=true clips them, `optimus rollback` goes back"
        trainer.say(
            f"step {trainer.progress.step}: gradients with a norm of {record.result.clipped_norm:.3g} have {what} ({cure})"
        )
