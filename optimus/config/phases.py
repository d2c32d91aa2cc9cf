"""The phases of a run: stretches of steps that may differ in data, sequence length, batch and learning rates."""

from typing import Any, NamedTuple

from optimus.config.tree import RunConfig


class Phase(NamedTuple):
    """A phase of a run, or a whole run without phases."""

    number: int
    name: str
    first: int  # number of steps of the run before the phase
    steps: int
    config: RunConfig
    """The configuration of the phase. If the phase has an `lr_schedule`, `train.steps` is the length of the phase."""

    @property
    def last(self) -> int:
        """The number of steps of the run at the phase's end."""
        return self.first + self.steps

    @property
    def step_tokens(self) -> int:
        """The number of tokens of a step."""
        return self.config.train.global_batch * self.config.train.sequence_length

    @property
    def replay(self) -> float:
        """The share of the phase's sequences that repeat data of earlier phases."""
        return (self.config.phases[self.number].replay or 0.0) if self.config.phases else 0.0

    def step_of_schedule(self, step: int) -> int:
        """Converts `step` of the run to the step of the phase's learning-rate schedule."""
        own = self.config.phases and self.config.phases[self.number].lr_schedule is not None
        return step - self.first if own else step


def phases_of(config: RunConfig) -> list[Phase]:
    """Returns the phases of a run. Raises `ValueError` for a length in epochs."""
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
    """Returns `config`, the configuration of a phase, with the values of `run` for the keys that phases can change."""
    train = {name: getattr(run.train, name) for name in ("sequence_length", "global_batch", "steps", "stop_at")}
    return config.changed(train=train).model_copy(update={"data": run.data, "lr_schedule": run.lr_schedule})


def phase_at(phases: list[Phase], step: int) -> Phase:
    """Returns the phase of `step`, counted from 1; the last phase for steps beyond the end."""
    return next((phase for phase in phases if step <= phase.last), phases[-1])


def tokens_after(phases: list[Phase], steps: int) -> int:
    """Returns the number of tokens read by the first `steps` steps."""
    return sum(phase.step_tokens * max(0, min(steps, phase.last) - phase.first) for phase in phases)


def sequences_after(phases: list[Phase], steps: int) -> int:
    """Returns the number of sequences read by the first `steps` steps."""
    return sum(phase.config.train.global_batch * max(0, min(steps, phase.last) - phase.first) for phase in phases)


def longest(phases: list[Phase]) -> RunConfig:
    """Returns the configuration of the phase with the longest sequences."""
    return max(phases, key=lambda phase: phase.config.train.sequence_length).config
