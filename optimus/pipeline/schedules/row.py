"""The sizes, the generator and the properties of a schedule."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from optimus.errors import UserError, said
from optimus.pipeline.schedule import Placement, Schedule


class Sizes(NamedTuple):
    """The numbers from which `ScheduleRow.make` generates a schedule.

    `warmup_factor` multiplies the number of live activations that a stage may have. `ahead` is the number of additional
    microbatches with saved activations in 1F1B, interleaved 1F1B, V-Half and V-Min.
    """

    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    warmup_factor: float = 1.0
    ahead: int = 0


@dataclass(frozen=True)
class ScheduleRow:
    """The generator and the properties of a schedule. `make` must return a schedule without sends and receives."""

    name: str
    make: Callable[[Sizes], Schedule]
    placement: Placement = "loop"
    stages: int = 1  # number of stages per rank; with `any_stages`, the minimum
    any_stages: bool = False
    in_rounds: bool = False
    """True if the schedule runs in rounds of `ranks` microbatches. A step then needs at least `ranks` microbatches."""
    deepens: bool = False  # True if the schedule supports a `warmup_factor` other than 1
    dominated: bool = False  # True if another schedule is about as fast with no more live activations
    recurs: bool = False
    """True if bubbles recur in the steady state when a stage's passes take unequal times, because the limit of live
    activations leaves a rank nothing else to run."""
    idle: Callable[[float, float], float] = lambda forward, all_passes: all_passes
    """Returns a lower bound on the idle time that a stage causes on later ranks in a step. The arguments are seconds of
    one microbatch: of the stage's forward pass, and of all its passes."""
    splits_backward: bool = False  # separate actions for the gradients of inputs and of weights
    live: Callable[[Sizes, int], int] | None = None
    """Returns a rank's peak number of microbatches with saved activations, for one stage per rank. Callers limit the
    result to the number of microbatches."""

    def without_actions(self, ranks: int, stages_per_rank: int) -> Schedule:
        """Returns a schedule without actions, which maps stages to ranks."""
        return Schedule(self.name, ranks, 0, (), stages_per_rank, self.placement, self.splits_backward)


@contextmanager
def naming_schedule(name: str, function: str) -> Iterator[None]:
    """Turns an error in `function` of the schedule `name` into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # code of a plugin may raise anything
        raise UserError(f"schedule {name}: its function {function} failed ({said(error)}): correct its code") from error
