"""The phases of a run: each a stretch of steps with data, sequence length, batch and learning rates of its own."""

from typing import Any, NamedTuple

from optimus.config.tree import RunConfig


class Phase(NamedTuple):
    """A phase of a run; a run without phases is one."""

    number: int
    name: str
    first: int  # steps of the run before it
    steps: int
    config: RunConfig
    """That of the run, with what the phase changes. Where it has a learning-rate schedule of its own, as long as it."""

    @property
    def last(self) -> int:
        """Steps of the run at its end."""
        return self.first + self.steps

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch * self.config.train.sequence_length

    @property
    def replay(self) -> float:
        """Share of its places that are read again from the phases before."""
        return (self.config.phases[self.number].replay or 0.0) if self.config.phases else 0.0

    def step_of_schedule(self, step: int) -> int:
        """The step of the run `step`, as the phase's learning-rate schedule counts."""
        own = self.config.phases and self.config.phases[self.number].lr_schedule is not None
        return step - self.first if own else step


def phases_of(config: RunConfig) -> list[Phase]:
    """The phases of a configuration whose length is known in steps."""
    if not config.phases:
        return [Phase(0, "", 0, config.train.total_steps, config)]
    found, first = list[Phase](), 0
    for number, phase in enumerate(config.phases):
        train: dict[str, Any] = {"sequence_length": phase.sequence_length, "global_batch": phase.global_batch}
        given: dict[str, Any] = {"data": phase.data}
        if phase.lr_schedule is not None:
            train |= {"steps": phase.steps, "stop_at": None}
            given["lr_schedule"] = phase.lr_schedule
        changed, steps = config.changed(train=train).model_copy(update=given), phase.steps or 0
        found.append(Phase(number, phase.name or f"phase-{number}", first, steps, changed))
        first += steps
    return found


def as_of_run(config: RunConfig, run: RunConfig) -> RunConfig:
    """`config`, that of a phase of `run`, with what phases change as the run has it."""
    train = {name: getattr(run.train, name) for name in ("sequence_length", "global_batch", "steps", "stop_at")}
    return config.changed(train=train).model_copy(update={"data": run.data, "lr_schedule": run.lr_schedule})


def phase_at(phases: list[Phase], step: int) -> Phase:
    """The phase of `step`, which counts from 1; beyond the last one, the last one."""
    return next((phase for phase in phases if step <= phase.last), phases[-1])


def tokens_after(phases: list[Phase], steps: int) -> int:
    """Tokens read by the first `steps`."""
    return sum(phase.step_tokens * max(0, min(steps, phase.last) - phase.first) for phase in phases)


def sequences_after(phases: list[Phase], steps: int) -> int:
    """Sequences read by the first `steps`."""
    return sum(phase.config.train.global_batch * max(0, min(steps, phase.last) - phase.first) for phase in phases)


def longest(phases: list[Phase]) -> RunConfig:
    """The configuration of the phase whose microbatches have most tokens."""
    return max(phases, key=lambda phase: phase.config.train.sequence_length).config
