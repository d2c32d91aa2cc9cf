"""Makes the GPipe schedule and schedules of forward passes.

GPipe runs all forward passes, then all backward passes (Huang et al. 2019, figure 2c).
"""

from dataclasses import replace

from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.schedules.row import ScheduleRow, Sizes
from optimus.pipeline.schedules.vocabulary import with_vocabulary
from optimus.pipeline.transfers import with_transfers


def gpipe(sizes: Sizes) -> Schedule:
    """Makes the GPipe schedule: every stage saves the activations of all microbatches.

    For equal stages and instant messages, the bubble is (ranks - 1) / microbatches of the computation time.
    """
    ranks, microbatches = sizes.ranks, sizes.microbatches
    orders = [
        [Action(kind, rank, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD) for microbatch in range(microbatches)]
        for rank in range(ranks)
    ]
    return Schedule("gpipe", ranks, microbatches, ()).in_order(orders)


def forward_only(placement: Schedule, microbatches: int, *, vocabulary: int = 0) -> Schedule:
    """Makes a schedule of forward passes; with a `vocabulary` algorithm, the schedule also has embedding passes."""
    orders = [
        [Action(Kind.FORWARD, stage, number) for stage in placement.stages_of(rank) for number in range(microbatches)]
        for rank in range(placement.ranks)
    ]
    made = replace(placement, microbatches=microbatches).in_order(orders)
    return with_transfers(with_vocabulary(made, vocabulary, backward=False) if vocabulary else made)


# 1F1B dominates GPipe.
ROWS = (ScheduleRow("gpipe", gpipe, dominated=True, live=lambda sizes, rank: sizes.microbatches),)
