"""A hook that profiles the computation and communication of one step."""

import torch

from optimus.errors import naming_disk_errors
from optimus.observe.traces import MERGED, merge_traces, rank_trace
from optimus.training.record import StepRecord
from optimus.training.run import read_together
from optimus.training.trainer import Hook, Order, Trainer


class Trace(Hook):
    """Profiles one step on all ranks. Each rank writes a trace, and rank 0 merges the traces that it can read."""

    order = Order.LAST

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def before_training(self, trainer: Trainer) -> None:
        self._begin(trainer)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if self._profile is not None:
            trainer.state.finish()  # otherwise pending operations would report to a stopped profiler
            self._profile.stop()
            profile, self._profile = self._profile, None
            read_together(lambda: self._write(trainer, profile), trainer.groups.world)  # waits for all ranks
            if trainer.groups.rank == 0:
                missing = merge_traces(trainer.folder, trainer.groups.world.size)
                without = (
                    f" (without ranks {', '.join(map(str, missing))}, whose traces are on their nodes)"
                    if missing
                    else ""
                )
                trainer.say(
                    f"step {record.step}: the trace of the ranks is in {trainer.folder / MERGED}{without}: open it in "
                    "Perfetto"
                )
        self._begin(trainer)

    def _write(self, trainer: Trainer, profile: torch.profiler.profile) -> None:
        path = rank_trace(trainer.folder, trainer.groups.rank)
        with naming_disk_errors(path, "Make room or remove observe.profile_step"):
            profile.export_chrome_trace(str(path))

    def _begin(self, trainer: Trainer) -> None:
        if (
            trainer.progress.step + 1 == trainer.config.observe.profile_step
            and trainer.progress.step < trainer.run.last_step
        ):
            self._profile = torch.profiler.profile()
            self._profile.start()

    def after_training(self, trainer: Trainer) -> None:
        if self._profile is not None:
            self._profile.stop()
