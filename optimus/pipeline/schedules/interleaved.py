"""1F1B with several stages per rank (Megatron-LM, Narayanan et al. 2021, section 2.2 and figure 4 bottom)."""

from collections.abc import Sequence

from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.schedules.one_f_one_b import take_turns
from optimus.pipeline.schedules.row import ScheduleRow, Sizes


def interleaved(sizes: Sizes) -> Schedule:
    """Makes interleaved 1F1B: stage s is on rank s mod ranks.

    If stages take equal times, messages take no time and microbatches are a multiple of ranks, the bubble is
    (ranks - 1) / (stages per rank * microbatches) of the compute time.
    """
    ranks, microbatches, stages_per_rank, _, ahead = sizes
    rounds = [range(first, first + ranks) for first in range(0, microbatches, ranks)]

    def passes(kind: Kind, stages: Sequence[int]) -> list[Action]:
        return [Action(kind, stage, microbatch) for round_ in rounds for stage in stages for microbatch in round_]

    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        live = 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks + 1 + ahead
        order = take_turns(passes(Kind.FORWARD, stages), passes(Kind.BACKWARD, stages[::-1]), live)
        orders.append([action for action in order if action.microbatch < microbatches])
    return Schedule("interleaved-1f1b", ranks, microbatches, (), stages_per_rank=stages_per_rank).in_order(orders)


ROWS = (ScheduleRow("interleaved-1f1b", interleaved, stages=2, any_stages=True, in_rounds=True),)
