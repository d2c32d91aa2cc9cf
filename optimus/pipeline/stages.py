"""Assigns the blocks of a model to the stages of a pipeline."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from optimus.errors import UserError

_MORE = 1 + 1e-9  # tolerance for rounding errors of costs and limits


class _Split(NamedTuple):
    largest: float
    summed: float
    ends: tuple[int, ...]


class Weights(NamedTuple):
    """The cost of each block of a model, and the extra cost of the first and of the last stage."""

    blocks: Sequence[float]
    first: float = 0.0
    last: float = 0.0


def divide(time: Weights, stages: int, memory: Weights | None = None) -> list[range]:
    """Returns the blocks of each stage, in order, so that the time of the slowest stage is minimal up to rounding.

    Among such partitions, the result minimises the largest `memory` of a stage, if given, up to rounding. Among the
    remaining partitions, the result minimises the sum of squared times.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    blocks = len(time.blocks)
    if blocks < stages:
        raise UserError(
            f"a model of {blocks} blocks cannot be divided into {stages} pipeline stages: use at most {blocks} "
            "(parallel.pipeline times parallel.stages_per_rank)"
        )
    taken = _sums(time, stages)
    held = taken if memory is None else _sums(memory, stages)

    def within(limit: float, cost: Callable[[int, int, int], float]) -> float:
        """Returns the largest `cost` of a stage, times `_MORE`, in the partition that minimises the largest cost.

        No stage may take more than `limit`.
        """
        return (
            _MORE
            * _search(blocks, stages, lambda *stage: (cost(*stage) if taken(*stage) <= limit else inf, 0.0)).largest
        )

    rough = _MORE * max(taken(*stage) for stage in _even(time.blocks, stages))  # an upper bound; prunes the search
    longest = within(rough, taken)
    fullest = within(longest, held)

    def unevenness(*stage: int) -> tuple[float, float]:
        fits = taken(*stage) <= longest and held(*stage) <= fullest
        return (0.0, taken(*stage) ** 2) if fits else (inf, 0.0)

    ends = _search(blocks, stages, unevenness).ends
    return [range(start, end) for start, end in zip((0, *ends), ends)]


def _even(weights: Sequence[float], stages: int) -> list[tuple[int, int, int]]:
    """Returns stages of about equal weight: (stage, first block, first block of the next stage)."""
    sums, ends = list(accumulate(weights)), [0]
    for stage in range(1, stages):
        wanted = bisect_left(sums, sums[-1] * stage / stages) + 1
        ends.append(min(max(wanted, ends[-1] + 1), len(weights) - stages + stage))
    return list(zip(range(stages), ends, [*ends[1:], len(weights)]))


def _sums(weights: Weights, stages: int) -> Callable[[int, int, int], float]:
    sums = list(accumulate(weights.blocks, initial=0.0))
    besides = {0: weights.first} | {stages - 1: weights.last + (weights.first if stages == 1 else 0.0)}
    return lambda stage, start, end: sums[end] - sums[start] + besides.get(stage, 0.0)


def _search(blocks: int, stages: int, cost: Callable[[int, int, int], tuple[float, float]]) -> _Split:
    """Returns a partition whose largest cost is minimal; if all finite costs are equal, the sum of terms is too.

    `cost(stage, start, end)` returns (cost, term) for a stage with the blocks `start` to `end` - 1. The cost must not
    fall with more blocks, and is infinite for a forbidden stage.
    """
    ends = [blocks]  # for each stage, the earliest possible end
    for stage in range(stages - 1, 0, -1):
        starts = range(stage, ends[0])
        ends.insert(0, starts[bisect_left(starts, True, key=lambda start: cost(stage, start, ends[0])[0] < inf)])
    # The best partition of the first `end` blocks over the stages so far, by `end`.
    best: list[_Split | None] = [_Split(0.0, 0.0, ()), *([None] * blocks)]
    for stage in range(stages):
        following: list[_Split | None] = [None] * (blocks + 1)
        possible = [(start, before) for start, before in enumerate(best) if before is not None]
        for end in range(max(stage + 1, ends[stage]), blocks - (stages - stage - 1) + 1):
            chosen: _Split | None = None
            for start, before in reversed(possible):
                if start >= end:
                    continue
                own, summed = cost(stage, start, end)
                if own == inf or (chosen is not None and own > chosen.largest):
                    break  # a stage with more blocks costs at least as much
                least = max(before.largest, own), before.summed + summed
                if chosen is None or (*least, before.ends) < (chosen.largest, chosen.summed, chosen.ends[:-1]):
                    chosen = _Split(*least, (*before.ends, end))
            following[end] = chosen
        best = following
    found = best[blocks]
    assert found is not None
    return found
