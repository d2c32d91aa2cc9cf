"""A hook that writes checkpoints at configured steps."""

from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class Checkpoints(Hook):
    """Saves checkpoints at configured intervals and at the end of the run. After an error, saves a checkpoint if the
    newest full checkpoint is older than the last completed step."""

    order = Order.SAVE

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        section, saver = trainer.config.checkpoint, trainer.checkpointer.saver
        saver.poll()
        weights = section.weights_every is not None and record.step % section.weights_every == 0
        trainer.save(full=record.step % section.every == 0 or trainer.is_done, weights=weights)
        if trainer.is_done:
            saver.finish()

    def after_error(self, trainer: Trainer) -> None:
        saver = trainer.checkpointer.saver
        saver.finish()
        if trainer.progress.step > trainer.checkpointer.saved:
            trainer.save(full=True)
            saver.finish()
