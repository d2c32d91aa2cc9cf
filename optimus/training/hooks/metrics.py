"""A hook that records every step."""

import math
import time

from optimus.config.sizes import size_text
from optimus.model.count import flops_per_token
from optimus.observe.evaluations import NewScores
from optimus.observe.machine import peak_flops
from optimus.observe.metrics import MetricsWriter
from optimus.training.accounting import imbalance, memory_by_kind, seconds_by_kind
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer


class Metrics(Hook):
    """Writes a record of every step to the run's metrics and shows the progress."""

    order = Order.RECORD
    ranks = "first"

    def before_training(self, trainer: Trainer) -> None:
        self._writer = MetricsWriter(trainer.folder, trainer.config, trainer.progress.step)
        self._scores = NewScores(trainer.folder)
        self._saved = 0.0  # seconds of waiting for checkpoints, in total until the previous record
        self._peak = peak_flops(trainer.run.device)
        self._memory: int | None = None

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        display, phase = trainer.display, trainer.progress.phase
        assert display is not None, "only the first rank has a display"
        saved = trainer.checkpointer.saver.seconds
        saving, self._saved = saved - self._saved, saved
        rate = phase.step_tokens / record.times.total
        flops = flops_per_token(trainer.config.model, phase.config.train.sequence_length)
        loss = record.result.loss if record.result.predicted else None
        details: dict[str, float] = {}
        if trainer.progress.step % trainer.config.observe.log_every == 0:
            memory = memory_by_kind(trainer.run)
            details = seconds_by_kind(record.times, saving) | memory
            self._memory = sum(memory.values())
            self._pass_scores()
        self._writer.write(
            {
                "step": trainer.progress.step,
                "tokens": trainer.progress.tokens,
                "time": round(time.time(), 3),
                "loss": loss,
                "balance_loss": record.result.balance_loss,
                "z_loss": record.result.z_loss,
                **({} if trainer.config.train.teacher is None else {"teacher_divergence": record.result.divergence}),
                "lr": record.result.lr,
                "grad_norm": record.result.grad_norm,
                "tokens_per_second": rate,
                "step_seconds": record.times.total,
                "data_seconds": record.times.data,
                "checkpoint_seconds": saving,
                "model_flops_utilization": self._peak and rate * flops / (self._peak * trainer.groups.world.size),
                "skipped_steps": trainer.progress.skipped,
                **_loss_scaling(trainer),
                **_by_source(trainer, record),
                **{name: value if math.isfinite(value) else None for name, value in record.values.items()},
                **(imbalance(record.expert_load) if record.expert_load else {}),
                **details,
            },
            record.expert_load or None,
            record.samples,
        )
        if record.result.overflow and (scale := trainer.progress.loss_scale) is not None:
            trainer.say(
                f"step {record.step}: the scaled gradients overflowed, so no update was applied; the loss scale is now "
                f"{scale.value:g}"
            )
        elif record.result.skipped:
            trainer.say(f"step {record.step} was skipped: no update was applied")
        if loss is None:
            trainer.say(
                f"step {record.step}: no token of the batch is predicted, so the step has no loss; check the data's masks"
            )
        taken = "" if self._memory is None else f"  {size_text(self._memory)}"
        said = f"loss {'-' if loss is None else f'{loss:.3f}'}  {rate:,.0f} tokens/s{taken}"
        display.update("training", record.step, trainer.run.last_step, said)

    def after_training(self, trainer: Trainer) -> None:
        self._pass_scores()
        self._writer.close()

    def _pass_scores(self) -> None:
        for scores in self._scores.read():
            self._writer.sinks.write(scores)
        self._scores.note()


def _loss_scaling(trainer: Trainer) -> dict[str, float]:
    """Returns the scale of the next step's loss and the number of overflows so far, with loss scaling."""
    scale = trainer.progress.loss_scale
    return {} if scale is None else {"loss_scale": scale.value, "overflow_steps": trainer.progress.overflows}


def _by_source(trainer: Trainer, record: StepRecord) -> dict[str, float]:
    tokens = trainer.run.data.tokens_by_source(trainer.progress.step)
    phase = {"phase": trainer.progress.phase.number} if trainer.progress.phase.name else {}
    read = {f"tokens/{name}": count for name, count in tokens.items() if len(tokens) > 1}
    losses = zip(trainer.run.data.phases[trainer.progress.phase.number].names, record.result.source_losses)
    return phase | read | {f"train_loss/{name}": loss for name, loss in losses if loss is not None}
