"""All forward passes, then all backward passes (GPipe, Huang et al. 2019, figure 2c)."""

from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.transfers import with_transfers


def gpipe(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Every stage keeps the activations of all microbatches. Bubble: (ranks - 1) / microbatches.

    Of several stages on a rank, the first does all its forward passes, then the next, and backward in reverse.

    The backward passes take the microbatches in the order of the forward passes, so that gradients are added in the
    order of the other schedules.
    """
    schedule = Schedule("gpipe", ranks, microbatches, (), stages_per_rank)
    orders = []
    for rank in range(ranks):
        stages = schedule.stages_of(rank)
        passes = [*((Kind.FORWARD, stage) for stage in stages), *((Kind.BACKWARD, stage) for stage in reversed(stages))]
        orders.append([Action(*each, microbatch) for each in passes for microbatch in range(microbatches)])
    return with_transfers(schedule, orders)
