"""Which source each place of a mixture is read from, as a pure function of the place.

The sources are the leaves of a binary tree. Of the first m places of a node, the nearest whole number to m times the
share of its left child are that child's: one more place adds one to exactly one child, so counts never fall and their sum
is the number of places. Counts are integers of any size, so nothing drifts; a place is found without those before it.
A node adds at most half a place to the error that its share hands down, so the tree is chosen for the smallest sum of these.

Where no tree is off by at most one place and the counts are exact again after few places, these few are a table instead.
It is made by earliest deadlines, which are off by less than one place whatever the weights are (Pfair scheduling on one
processor, Baruah et al. 1996; Tijdeman 1980).

Legend: N places, P those of a period.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import count
from math import gcd, lcm
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_BOUNDS = np.linspace(0.5, 1.3, 14).tolist()  # of the error, that trees are built for; the best one is taken
_TOTAL = 1 << 30  # of the weights, so that products of two fit into 62 bits
_LONGEST = 1 << 14  # period of a table, which takes 30 ms to make

IndexArray = NDArray[np.int64]


class _Order(Protocol):
    """Which source each place has; see `Mixture`."""

    @property
    def error(self) -> float: ...
    def counts(self, places: int) -> list[int]: ...
    def locate(self, places_N: IndexArray) -> tuple[IndexArray, IndexArray]: ...


class Mixture:
    """Sources that share places by whole `weights`, of which at least one is above 0.

    Source i has `weights[i] / sum(weights)` of the first n places, within `error` places, for every n.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = _reduced(weights)
        self._order: _Order = _Tree(self.weights)
        if self._order.error > 1 and sum(self.weights) <= _LONGEST:
            self._order = _Table(self.weights)

    @property
    def error(self) -> float:
        """The most places by which a source can be off: at most 1 for up to three sources and for weights whose sum, in
        lowest terms, is at most 16,384; for others, too, mostly, and 1.22 is the largest known."""
        return self._order.error

    def counts(self, places: int) -> list[int]:
        """How many of the first `places` each source has."""
        return self._order.counts(places)

    def locate(self, places_N: IndexArray) -> tuple[IndexArray, IndexArray]:
        """The source of each place [N], and how many places before it that source has [N]."""
        return self._order.locate(places_N)


class _Table:
    """The sources of a period after which all counts are exact."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = np.array(weights)
        period = sum(weights)
        released: list[list[tuple[int, int]]] = [[] for _ in range(period)]  # by place, with deadlines
        for source, weight in enumerate(weights):
            for number in range(weight):
                released[number * period // weight].append((-(-(number + 1) * period // weight), source))
        waiting, order = list[tuple[int, int]](), list[int]()
        for due in released:
            for each in due:
                heapq.heappush(waiting, each)
            order.append(heapq.heappop(waiting)[1])
        self._source_P = np.array(order)
        self._index_P = np.empty_like(self._source_P)
        for source, weight in enumerate(weights):
            self._index_P[self._source_P == source] = np.arange(weight)

    @cached_property
    def error(self) -> float:
        """That of all places: a source falls behind until its place, and is ahead after it."""
        share_P = self._weights[self._source_P] / len(self._source_P)
        behind_P = np.arange(len(share_P)) * share_P - self._index_P
        return float(max(behind_P.max(), (1 - share_P - behind_P).max()))

    def counts(self, places: int) -> list[int]:
        """As `Mixture.counts`."""
        periods, rest = divmod(places, len(self._source_P))
        within = np.bincount(self._source_P[:rest], minlength=len(self._weights))
        return [periods * weight + number for weight, number in zip(self._weights.tolist(), within.tolist())]

    def locate(self, places_N: IndexArray) -> tuple[IndexArray, IndexArray]:
        """As `Mixture.locate`."""
        period_N, rest_N = np.divmod(places_N, len(self._source_P))
        source_N = self._source_P[rest_N]
        return source_N, period_N * self._weights[source_N] + self._index_P[rest_N]


@dataclass(frozen=True)
class _Node:
    """A source, or two nodes that share places by their weights."""

    weight: int
    source: int = -1
    children: tuple["_Node", ...] = ()


class _Tree:
    """A binary tree of the sources."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._sources = len(weights)
        leaves = [_Node(weight, source) for source, weight in enumerate(weights) if weight]
        candidates = [
            _balanced(sorted(leaves, key=lambda leaf: -leaf.weight)),
            *(_urgent(leaves, by) for by in _BOUNDS),
        ]
        self._root = min(candidates, key=_error)

    @property
    def error(self) -> float:
        """A bound of it."""
        return _error(self._root)

    def counts(self, places: int) -> list[int]:
        """As `Mixture.counts`."""
        found = [0] * self._sources
        pending = [(self._root, places)]
        while pending:
            node, number = pending.pop()
            if not node.children:
                found[node.source] = number
                continue
            left, right = node.children
            of_left = (2 * number * left.weight + node.weight) // (2 * node.weight)
            pending += [(left, of_left), (right, number - of_left)]
        return found

    def locate(self, places_N: IndexArray) -> tuple[IndexArray, IndexArray]:
        """As `Mixture.locate`."""
        source_N, index_N = np.empty_like(places_N), np.empty_like(places_N)
        pending = [(self._root, places_N, np.arange(len(places_N)))]
        while pending:
            node, numbers, where = pending.pop()
            if not node.children:
                source_N[where], index_N[where] = node.source, numbers
                continue
            left, right = node.children
            before, after = _of_left(numbers, left, node), _of_left(numbers + 1, left, node)
            goes_left = after > before
            for child, found, chosen in ((left, before, goes_left), (right, numbers - before, ~goes_left)):
                if chosen.any():
                    pending.append((child, found[chosen], where[chosen]))
        return source_N, index_N


def whole_weights(weights: Sequence[float | Fraction]) -> list[int]:
    """Whole numbers in the ratio of `weights`; floats are taken as the decimals that they are written as."""
    exact = [Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


def _reduced(weights: Sequence[int]) -> list[int]:
    """In lowest terms; rounded where these are too large to be multiplied."""
    if min(weights) < 0 or not sum(weights):
        raise ValueError(f"weights must not be negative, and one must be above 0: {list(weights)}")
    divisor = gcd(*weights)
    weights = [weight // divisor for weight in weights]
    if (total := sum(weights)) >= _TOTAL:
        weights = [weight and max(1, weight * (_TOTAL - len(weights)) // total) for weight in weights]
    return list(weights)


def _of_left(numbers: IndexArray, left: _Node, node: _Node) -> IndexArray:
    """As in `_Tree.counts`, in steps that do not overflow."""
    whole, rest = np.divmod(numbers, node.weight)
    return whole * left.weight + (2 * rest * left.weight + node.weight) // (2 * node.weight)


def _joined(left: _Node, right: _Node) -> _Node:
    return _Node(left.weight + right.weight, children=(left, right))


def _urgent(leaves: Sequence[_Node], bound: float) -> _Node:
    """Joins the two nodes that can best bear more nodes above them until one is left, as Huffman (1952) does the lightest.

    A leaf's error is half its weight times the sum of 1 / weight over itself and the nodes above it but the root. So a
    node has left, of 2 * bound / weight of each leaf, the least that the nodes below it leave.
    """
    order = count()
    heap = [(-(2 * bound - 1) / leaf.weight, next(order), leaf) for leaf in leaves]
    heapq.heapify(heap)
    while len(heap) > 1:
        (one, _, left), (other, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        joined = _joined(left, right)
        heapq.heappush(heap, (max(one, other) + 1 / joined.weight, next(order), joined))
    return heap[0][2]


def _balanced(leaves: Sequence[_Node]) -> _Node:
    """Split where the halves' weights are nearest to each other, and each half again."""
    if len(leaves) == 1:
        return leaves[0]
    sums = np.cumsum([leaf.weight for leaf in leaves])
    split = 1 + int(np.abs(2 * sums[:-1] - sums[-1]).argmin())
    return _joined(_balanced(leaves[:split]), _balanced(leaves[split:]))


def _error(node: _Node, handed_down: float = 0.0) -> float:
    """The largest error of a source below `node`, which has `handed_down`."""
    if not node.children:
        return handed_down
    return max(_error(child, handed_down * child.weight / node.weight + 0.5) for child in node.children)
