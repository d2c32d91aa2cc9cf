"""Progress of a run: all that changes while it trains."""

from dataclasses import dataclass

from optimus.config.phases import Phase, phase_at, tokens_after


@dataclass
class Progress:
    """How far a run is. Every checkpoint has it; all else that changes is in the state, and in the hooks' own."""

    phases: list[Phase]
    """One where the run has none."""
    step: int = 0
    """Steps completed."""
    skipped: int = 0
    """Of them, without an update."""

    @property
    def tokens(self) -> int:
        """Tokens read by all completed steps."""
        return tokens_after(self.phases, self.step)

    @property
    def phase(self) -> Phase:
        """That of the last completed step; before the first step, the first one."""
        return phase_at(self.phases, self.step)
