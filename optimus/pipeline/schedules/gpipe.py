"""All forward passes, then all backward passes (GPipe, Huang et al. 2019, figure 2c)."""

from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.transfers import with_transfers


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Every stage keeps the activations of all microbatches. Bubble: (ranks - 1) / microbatches.

    The backward passes take the microbatches in the order of the forward passes, so that gradients are added in the
    order of the other schedules.
    """
    orders = [
        [Action(kind, rank, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD) for microbatch in range(microbatches)]
        for rank in range(ranks)
    ]
    return with_transfers(Schedule("gpipe", ranks, microbatches, ()), orders)
