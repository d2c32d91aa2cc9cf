"""What a schedule says of itself: a row of the table that everybody else asks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from optimus.pipeline.schedule import Placement, Schedule


class Sizes(NamedTuple):
    """What a schedule is made for. `warmup_factor`: how many times its usual live activations a stage may hold; `ahead`:
    by how many microbatches more its forward passes are ahead."""

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
    stages: int = 1  # on each rank; of more, where the schedule takes `any_stages`, the least
    any_stages: bool = False
    in_rounds: bool = False
    """Whether microbatches go in rounds of as many as there are ranks: fewer cannot be, and part of a round takes as long as
    a whole one."""
    deepens: bool = False  # whether it takes a `warmup_factor`
    dominated: bool = False  # whether another one takes as long and keeps less, so that no search tries it
    idle: Callable[[float, float], float] = lambda forward, whole: whole
    """Its bound: what a stage leaves the ranks after it idle in a step at least, from the seconds of its forward pass and of
    all its passes of one microbatch."""
    splits_backward: bool = False  # whether the gradients of inputs and of weights are actions of their own
    live: Callable[[Sizes, int], int] | None = None
    """Activations that the one stage of a rank keeps at most, if there are enough microbatches; None: its order says it."""

    def place(self, ranks: int, stages_per_rank: int) -> Schedule:
        """Which rank has which stages; without actions."""
        return Schedule(self.name, ranks, 0, (), stages_per_rank, self.placement, self.splits_backward)
