"""The properties of a schedule: one row of the table `schedules()`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from optimus.pipeline.schedule import Placement, Schedule


class Sizes(NamedTuple):
    """The sizes of a schedule.

    `warmup_factor` multiplies the number of live activations that a stage may have. `ahead` is the number of additional
    forward passes in the warm-up, for 1F1B and interleaved 1F1B.
    """

    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    warmup_factor: float = 1.0
    ahead: int = 0


@dataclass(frozen=True)
class ScheduleRow:
    """The generator and the properties of a schedule.

    `make` lists the computations of every rank in order; `with_transfers` adds sends and receives later.
    """

    name: str
    make: Callable[[Sizes], Schedule]
    placement: Placement = "loop"
    stages: int = 1  # number of stages per rank; with `any_stages`, the minimum
    any_stages: bool = False
    in_rounds: bool = False
    """True if the schedule runs rounds of as many microbatches as ranks. Such a schedule needs at least one round."""
    deepens: bool = False  # True if the schedule supports a `warmup_factor` other than 1
    # True if another schedule takes about the same time with at most as many live activations; searches then skip this
    # schedule.
    dominated: bool = False
    idle: Callable[[float, float], float] = lambda forward, all_passes: all_passes
    """Returns a lower bound on the idle time that a stage causes on the later ranks in a step. The arguments are the seconds
    of the stage's forward pass, and the seconds of all its passes, of one microbatch."""
    splits_backward: bool = False  # True if the gradients of inputs and of weights are separate actions
    live: Callable[[Sizes, int], int] | None = None
    """Returns, for a schedule of one stage per rank, the peak live activations of a rank if there are enough microbatches.
    None means that callers count live activations from the order of actions."""

    def without_actions(self, ranks: int, stages_per_rank: int) -> Schedule:
        """Returns a schedule without actions, which maps stages to ranks."""
        return Schedule(self.name, ranks, 0, (), stages_per_rank, self.placement, self.splits_backward)
