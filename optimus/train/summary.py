"""What a run is about to do, in a few lines and before it does it; and what in it looks like a mistake."""

from dataclasses import dataclass, field

from optimus.config import RunConfig
from optimus.config.sizes import count_text
from optimus.mesh import Mesh
from optimus.model.count import count_parameters

_MOST_EPOCHS = 4  # beyond which repeated data is worth ever less (Muennighoff et al., 2023)


@dataclass(frozen=True)
class Summary:
    """Numbers of a run whose configuration is settled. `tokens` and `epochs` are what it reads up to `last_step`."""

    family: str
    parameters: int
    active_parameters: int
    steps: int
    last_step: int
    tokens: int
    data_tokens: int
    epochs: float
    warmup_steps: int
    global_batch: int
    microbatches: int  # of a step on each data-parallel rank
    micro_batch: int
    context: int
    ranks: int
    data_ranks: int
    precision: str
    warnings: list[str] = field(default_factory=list)

    def lines(self, precision_note: str = "") -> list[str]:
        """One per subject, each with its label."""
        active = f", {count_text(self.active_parameters)} active" if self.active_parameters < self.parameters else ""
        stops = f", stopping after step {self.last_step:,}" if self.last_step < self.steps else ""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks:,} ranks, {self.data_ranks:,} of them data-parallel"
        share = 100 * self.warmup_steps / self.steps
        return [
            f"model: {self.family}, {count_text(self.parameters)} parameters{active}",
            f"length: {self.steps:,} steps{stops}, {count_text(self.tokens)} tokens: {self.epochs:.3g} epochs of the "
            f"{count_text(self.data_tokens)} in the data",
            f"warm-up: {self.warmup_steps:,} steps, {share:.3g} % of the run",
            f"batch: {self.global_batch:,} sequences of {self.context:,} tokens, on each data-parallel rank "
            f"{self.microbatches:,} x {self.micro_batch:,}",
            f"layout: {ranks}",
            f"precision: {self.precision}{precision_note}",
            *(f"warning: {text}" for text in self.warnings),
        ]


def summarise(config: RunConfig, mesh: Mesh, instances: int) -> Summary:
    """Of a run whose configuration is settled, on `mesh`, with `instances` sequences of data."""
    train, counted = config.train, count_parameters(config.model)
    last = train.stop_at or train.total_steps
    return Summary(
        family=config.model.family,
        parameters=counted.total,
        active_parameters=counted.active,
        steps=train.total_steps,
        last_step=last,
        tokens=last * train.global_batch * train.context,
        data_tokens=instances * train.context,
        epochs=last * train.global_batch / instances,
        warmup_steps=config.warmup_steps,
        global_batch=train.global_batch,
        microbatches=train.global_batch // (mesh.dp * train.micro_batch),
        micro_batch=train.micro_batch,
        context=train.context,
        ranks=mesh.size,
        data_ranks=mesh.dp,
        precision=train.precision,
        warnings=warnings(config, instances),
    )


def warnings(config: RunConfig, instances: int) -> list[str]:
    """What is possible and most likely not meant, each with the keys that mend it."""
    train, schedule = config.train, config.schedule
    steps, warmup, found = train.total_steps, config.warmup_steps, []
    epochs = (train.stop_at or steps) * train.global_batch / instances
    if epochs > _MOST_EPOCHS:
        found.append(
            f"the run reads its data {epochs:.3g} times: after {_MOST_EPOCHS} times a model learns little from it and "
            "begins to recite it. Prepare more text, or shorten the run (train.steps, train.tokens, train.epochs)"
        )
    if warmup > steps / 2:
        reached = schedule.peak * min(1.0, steps / warmup)
        found.append(
            f"the warm-up takes {warmup:,} of {steps:,} steps (schedule.warmup_steps), so that the learning rate ends at "
            f"{reached:.2g} of schedule.peak {schedule.peak:g}. Set it to {max(1, steps // 20)}, or lengthen the run"
            if warmup >= steps
            else f"the warm-up takes more than half of the run, {warmup:,} of {steps:,} steps. Set schedule.warmup_steps to "
            f"{max(1, steps // 20)}, or lengthen the run"
        )
    if train.global_batch > instances:
        found.append(
            f"a step reads {train.global_batch:,} sequences (train.global_batch), but the data has {instances:,}: one step "
            "sees the same text more than once. Lower it, or prepare more text"
        )
    return found
