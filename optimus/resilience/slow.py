"""Which ranks are slower than the others, by what they compute themselves (MegaScale; C4)."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Slow(NamedTuple):
    """A rank, and how many times the median of its peers it takes."""

    rank: int
    times: float


def find_slow(seconds: Mapping[int, float], peers: Sequence[Sequence[int]], percent: float) -> list[Slow]:
    """Of the seconds that each rank computes in a step, waiting left out: those above their peers' median by `percent`.

    `peers` are ranks that have the same to do, such as those of one stage of a pipeline. With fewer than three of them
    there is no telling who is slow and who is fast: all ranks are compared instead.
    """
    found = []
    everybody = statistics.median(seconds.values())
    for group in peers:
        middle = statistics.median(seconds[rank] for rank in group) if len(group) > 2 else everybody
        found += [Slow(rank, seconds[rank] / middle) for rank in group if seconds[rank] > middle * (1 + percent / 100)]
    return sorted(found, key=lambda slow: -slow.times)


class Persistence:
    """Counts how often in a row a rank has been found slow."""

    def __init__(self, often: int) -> None:
        self._often = often
        self._counts: Counter[int] = Counter()

    def note(self, found: Sequence[Slow]) -> list[Slow]:
        """Those that have just been found slow for the `often`-th time in a row."""
        ranks = {slow.rank for slow in found}
        self._counts = Counter({rank: self._counts[rank] + 1 for rank in ranks})
        return [slow for slow in found if self._counts[slow.rank] == self._often]
