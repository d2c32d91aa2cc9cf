"""Assigns each position of a mixture to a source, as a pure function of the position.

A position is the index of a sequence in its phase. Among the first n positions, the count of a source with the share r
differs from n r by less than one, for every n (Pfair scheduling on one processor, Baruah et al. 1996).

Legend: N positions.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, repeat
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

_TOTAL = 1 << 30  # the sum of the reduced weights is less than this number
_LEAST = 128  # approximate minimum number of positions of a group in a block
_BLOCKS = 4  # maximum number of cached blocks of a group

IndexArray = NDArray[np.int64]


class Mixture:
    """A mixture of sources in proportion to integer `weights`.

    Reduces the weights to lowest terms. If the sum is then 2^30 or more, rounds the weights.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = _reduced(weights)
        total = sum(self.weights)
        order = sorted((source for source, weight in enumerate(self.weights) if weight), key=lambda i: -self.weights[i])
        sums = list(accumulate(self.weights[source] for source in order))

        def longest(heavy: int) -> float:
            """Estimates the positions of each group in a block, and returns the greater number.

            The first group has the `heavy` heaviest sources.
            """
            ends = sums[heavy - 1] / self.weights[order[heavy - 1]], (total - sums[heavy - 1]) / self.weights[order[-1]]
            return max(ends)

        heavy = min(range(1, len(order) + 1), key=longest)
        phase = total | 1  # odd, so that the division in `_Group.positions_before` never has the remainder 0
        parts = (order[:heavy], phase), (order[heavy:], 2 * total - phase)
        self._groups = [_Group(self.weights, sources, phase) for sources, phase in parts if sources]

    def counts(self, positions: int) -> list[int]:
        """Counts the sequences of each source at the first `positions` positions."""
        found = [0] * len(self.weights)
        for group in self._groups:
            for source, number in zip(group.sources, group.counts(positions)):
                found[source] = number
        return found

    def locate(self, position_N: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Returns the source of each position [N], and the number of earlier positions of that source [N]."""
        found_N2 = np.array([self._at(position) for position in position_N.tolist()], np.int64).reshape(-1, 2)
        return found_N2[:, 0], found_N2[:, 1]

    def _at(self, position: int) -> tuple[int, int]:
        first, *others = self._groups
        step = first.positions_before(position)
        if others and first.positions_before(position + 1) == step:
            return others[0].at(position, position - step)
        return first.at(position, step)


class _Group:
    """A group of `sources`. Each source has floor(n r) or ceil(n r) of the first n positions, where r is its share.

    The group, with the share R, has h(n) = floor(n R + phase / 2W) of the first n positions, where W is the sum of all
    weights. The group therefore has floor(m R) or ceil(m R) of any m consecutive positions. The other positions form a
    second group with the same property. The k-th sequence of a source (from 0) gets a position that is at least
    floor(k / r) and below the deadline ceil((k + 1) / r). Sequences that must lie between s and t are due there. By
    Hall's theorem, the sequences of a block fit if, between any s and t, the group has at least as many positions as
    due sequences. The rule "earliest deadline first" then finds a schedule (one machine, jobs of unit length).

    Within the block, the sources with sequences due between s and t have a total share Q <= R. The number of these
    sequences is sum(floor(t r) - ceil(s r)) <= floor((t - s) Q), and the group has enough positions for the sequences.
    Let A be the sources that have floor(n r) + 1 positions before a border n, and U the sources whose next deadline is
    after t. Let f(X) be the sum of n r mod 1 over the sources X, and p = 1 - phase / 2W. The sequences due from n to t
    fit if |A in U| <= h(t) - sum(floor(t r)). The bound |A in U| <= ceil(f(U) - p) is enough. Let V be the sources
    whose current sequence may lie before s. The sequences due from s to n fit if |A in V| >= ceil(f(V) - p). The sets U
    are nested, and so are the sets V. A set A with both bounds exists by the matroid intersection theorem, since
    ceil(f(V) - p) <= ceil(f(U) - p) + |V without U|.

    `_border` goes through the sources, the longest wait first. For each element that A must have, `_border` takes the
    source with the nearest deadline among the sources so far. This choice puts the fewest elements into every U.
    """

    def __init__(self, weights: Sequence[int], sources: Sequence[int], phase: int) -> None:
        self.sources, self._total, self._phase = sources, sum(weights), phase
        self._weights = [weights[source] for source in sources]
        self._weight = sum(self._weights)
        # Length of a block in positions. Every source has a deadline in every block.
        self._length = max(-(-self._total // min(self._weights)), _LEAST * self._total // self._weight)
        self._block = lru_cache(_BLOCKS)(self._found)

    def positions_before(self, number: int) -> int:
        """Counts the positions of the group among the first `number` positions."""
        return (2 * number * self._weight + self._phase) // (2 * self._total)

    def at(self, position: int, step: int) -> tuple[int, int]:
        """Returns (source at `position`, number of earlier positions of this source).

        The group must have `position`. `step` is the number of earlier positions of the group.
        """
        before, found = self._block(position // self._length)
        return found[step - before]

    def counts(self, positions: int) -> list[int]:
        """Counts the sequences of each of the group's sources at the first `positions` positions."""
        number = positions // self._length
        counts = dict(zip(self.sources, self._border(number * self._length)))
        before, found = self._block(number)
        for source, index in found[: self.positions_before(positions) - before]:
            counts[source] = index + 1
        return list(counts.values())

    def _border(self, number: int) -> list[int]:
        """Computes `counts` at position `number`, the border of a block."""
        quotient, rest = zip(*(divmod(number * weight, self._total) for weight in self._weights))
        counts, sums, open_sources = list(quotient), self._phase, list[tuple[float, int]]()
        # The source that has waited longest comes first.
        for i in sorted(range(len(rest)), key=lambda i: -rest[i] / self._weights[i]):
            heapq.heappush(open_sources, ((self._total - rest[i]) / self._weights[i], i))
            sums += 2 * rest[i]
            if sums >= 2 * self._total:
                sums -= 2 * self._total
                counts[heapq.heappop(open_sources)[1]] += 1
        return counts

    def _found(self, number: int) -> tuple[int, list[tuple[int, int]]]:
        """Schedules block `number`. Returns (number of the group's positions before the block, schedule).

        The schedule has (source, number of earlier positions of this source) for each of the group's positions.
        """
        start, total = number * self._length, self._total
        end, jobs = start + self._length, list[tuple[int, int, int, int]]()
        for source, weight, first, last in zip(self.sources, self._weights, self._border(start), self._border(end)):
            borders = [index * total // weight for index in range(first, last + 1)]
            fractional = [index * total % weight > 0 for index in range(first + 1, last + 1)]
            due = (min(border + more, end) for border, more in zip(borders[1:], fractional))
            jobs += zip(borders, due, repeat(source), range(first, last))
        jobs.sort()
        waiting, found, taken = list[tuple[int, int, int]](), list[tuple[int, int]](), 0
        steps = self.positions_before(start)
        for step in range(steps + 1, steps + 1 + len(jobs)):
            # The last position with fewer than `step` positions of the group before it.
            position = (2 * total * step - self._phase - 1) // (2 * self._weight)
            while taken < len(jobs) and jobs[taken][0] <= position:
                heapq.heappush(waiting, jobs[taken][1:])
                taken += 1
            found.append(heapq.heappop(waiting)[1:])
        return steps, found


def integer_weights(weights: Sequence[float | Fraction]) -> list[int]:
    """Scales `weights` to whole numbers in the same ratios. A float counts as its decimal notation."""
    exact = [Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


def _reduced(weights: Sequence[int]) -> list[int]:
    """Reduces weights to lowest terms, and rounds weights with a sum of at least `_TOTAL`."""
    if min(weights) < 0 or not sum(weights):
        raise ValueError(f"weights must not be negative, and one must be above 0: {list(weights)}")
    divisor = gcd(*weights)
    weights = [weight // divisor for weight in weights]
    if (total := sum(weights)) >= _TOTAL:
        weights = [weight and max(1, weight * (_TOTAL - len(weights)) // total) for weight in weights]
    return list(weights)
