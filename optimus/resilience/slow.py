"""Which ranks are slower than the others, by what they compute themselves (MegaScale; C4)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Slow(NamedTuple):
    """A rank, and how many times the median of its peers it takes."""

    rank: int
    times: float


def find_slow(
    seconds: Mapping[int, float],
    peers: Sequence[Sequence[int]],
    percent: float,
    usual: Mapping[int, float] | None = None,
) -> list[Slow]:
    """Of the seconds that each rank computes in a step, waiting left out: those above their peers' median by `percent`.

    `peers` are ranks that have the same to do, such as those of one stage of a pipeline; of two, the faster one is the
    measure, as nothing makes a rank faster than it is. A rank without any has other work than everybody else: it is slow
    when it takes so much longer than what was `usual` of it (the least of `alone` so far), not when it has more to do.
    """
    times = {
        rank: seconds[rank] / statistics.median_low(seconds[r] for r in group) for group in peers for rank in group
    }
    for rank, relation in alone(seconds, peers).items():
        times[rank] = relation / (usual or {}).get(rank, relation)
    found = (Slow(rank, times[rank]) for rank in times if times[rank] > 1 + percent / 100)
    return sorted(found, key=lambda slow: -slow.times)


def alone(seconds: Mapping[int, float], peers: Sequence[Sequence[int]]) -> dict[int, float]:
    """How many times the median of all ranks those take that have no peers."""
    middle = statistics.median_low(seconds.values())
    return {group[0]: seconds[group[0]] / middle for group in peers if len(group) == 1}
