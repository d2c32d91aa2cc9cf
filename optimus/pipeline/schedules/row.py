"""The properties of a schedule: one row of the table of schedules, which all other modules query."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from optimus.pipeline.schedule import Placement, Schedule


class Sizes(NamedTuple):
    """The sizes for which a schedule is made.

    `warmup_factor` is the number of live activations that a stage may hold, relative to the usual number. `ahead` is the
    number of microbatches by which forward passes are further ahead than usual.
    """

    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    warmup_factor: float = 1.0
    ahead: int = 0


@dataclass(frozen=True)
class Row:
    """A schedule. `make` lists the computations of every rank in order; sends and receives are added later."""

    name: str
    make: Callable[[Sizes], Schedule]
    placement: Placement = "loop"
    stages: int = 1  # per rank; the minimum, where the schedule takes `any_stages`
    any_stages: bool = False
    in_rounds: bool = False
    """True if microbatches go in rounds of as many as there are ranks. Fewer microbatches than ranks are impossible, and an
    incomplete round takes as long as a whole one."""
    deepens: bool = False  # whether the schedule takes a `warmup_factor`
    dominated: bool = False  # another schedule takes as long and keeps less, so no search tries this one
    idle: Callable[[float, float], float] = lambda forward, whole: whole
    """A lower bound on the idle time that a stage causes on the later ranks in a step. The arguments are the seconds of the
    stage's forward pass, and of all its passes of one microbatch."""
    splits_backward: bool = False  # whether the gradients of inputs and of weights are actions of their own
    live: Callable[[Sizes, int], int] | None = None
    """The most activations that the one stage of a rank keeps, if there are enough microbatches; None: the order determines
    it."""

    def place(self, ranks: int, stages_per_rank: int) -> Schedule:
        """Returns a schedule without actions, which maps stages to ranks."""
        return Schedule(self.name, ranks, 0, (), stages_per_rank, self.placement, self.splits_backward)
