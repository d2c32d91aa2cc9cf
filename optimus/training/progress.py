"""The progress of a run."""

from dataclasses import dataclass

from optimus.config.phases import Phase, phase_at, tokens_after
from optimus.training.loss_scale import LossScale


@dataclass
class Progress:
    """The progress of a run."""

    phases: list[Phase]
    """The phases of the run; a run without phases has a single phase."""
    step: int = 0
    """The number of completed steps."""
    skipped: int = 0
    """The number of completed steps without an update, except overflows."""
    loss_scale: LossScale | None = None
    """The scale of the next step's loss; None without loss scaling."""
    overflows: int = 0
    """The number of completed steps without an update because the scaled gradients overflowed."""
    schedule_lag: int = 0
    """The number of overflows since the current learning-rate schedule began: overflows do not advance it."""

    @property
    def tokens(self) -> int:
        """The number of tokens of all completed steps."""
        return tokens_after(self.phases, self.step)

    @property
    def phase(self) -> Phase:
        """The phase of the last completed step; before the first step, the first phase."""
        return phase_at(self.phases, self.step)
