"""Embedding and output layer on all ranks, each with its part of the vocabulary.

Balancing Pipeline Parallelism with Vocabulary Parallelism, Yeung et al. 2024, algorithm 1: a rank's pass over its logits (S)
needs the last stage's output, its pass over their gradients (T) the normaliser, made of what all ranks have found; the last
stage's backward pass needs the sum of what they give back.
"""

from collections.abc import Iterator
from dataclasses import replace

from optimus.pipeline.replay import ScheduleError
from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.transfers import UNITS

_BEFORE = (Kind.LOSS, Kind.LOGITS, Kind.EMBED)  # others wait for these

_HELD = 2  # gradients for the embedding that wait until a rank has time, at most

AHEAD = 2
"""Microbatches by which the forward passes of 1F1B must be further ahead, so that what the last stage's backward pass waits
for, S and then T on all ranks, is done beside its forward passes of the next ones (section 5.2: p + 2 activations)."""


def with_vocabulary(schedule: Schedule, *, backward: bool = True) -> Schedule:
    """`schedule`, of computations alone, with the passes of the vocabulary put where they can be done soonest: its own order
    stays as it is.

    Without `backward`, where it has forward passes alone, that is the embedding.

    The computations are played with usual times. Whenever a rank is free, what others wait for comes first; the gradients of
    the embedding, for which nobody waits, come last, unless more than a few of them are held.
    """
    result = replace(schedule, splits_vocabulary=True)
    orders: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    own = schedule.actions
    position = [0] * schedule.ranks
    before, after = (_BEFORE, [Kind.EMBED_BACKWARD]) if backward else ((Kind.EMBED,), [])
    following = [dict.fromkeys((*before, *after), 0) for _ in own]
    free = [0.0] * schedule.ranks
    ends: dict[Action, float] = {}

    def options(rank: int) -> Iterator[tuple[float, int, int, Action]]:
        """(start, priority, rank, action) of each that could be next on `rank`."""
        candidates = [Action(kind, rank, following[rank][kind]) for kind in before]
        candidates += own[rank][position[rank] : position[rank] + 1]
        for kind in after:
            number = following[rank][kind]
            late = Action(result.first_backward, 0, number + _HELD) in ends
            candidates.insert(0 if late else len(candidates), Action(kind, rank, number))
        for priority, action in enumerate(candidates):
            inputs = result.inputs_of(action)
            if action.microbatch < schedule.microbatches and all(needed in ends for needed in inputs):
                yield max([free[rank], *(ends[needed] for needed in inputs)]), priority, rank, action

    left = sum(map(len, own)) + len(following[0]) * schedule.ranks * schedule.microbatches
    while left:
        found = min((option for rank in range(schedule.ranks) for option in options(rank)), default=None)
        if found is None:
            raise ScheduleError(f"schedule {schedule.name}: its order leaves no place for the passes of the vocabulary")
        start, _, rank, action = found
        ends[action] = free[rank] = start + UNITS[action.kind]
        orders[rank].append(action)
        if action.kind.of_vocabulary:
            following[rank][action.kind] += 1
        else:
            position[rank] += 1
        left -= 1
    return result.in_order(orders)
