"""Mixtures: exact counts at every position; any position is located directly."""

from itertools import pairwise

import numpy as np
import pytest

from optimus.data import mixture as module
from optimus.data.mixture import Mixture, integer_weights

MIXTURES = [[1], [1, 1], [7, 2, 1], [35, 30, 20, 10, 5], [1000, 1], [1] * 50, [0, 3, 0, 4], [5, 8, 13, 21, 34, 55]]


def fractions(mixture: Mixture, positions: int) -> np.ndarray:
    return positions * np.array(mixture.weights) / sum(mixture.weights)


@pytest.mark.parametrize("weights", MIXTURES, ids=str)
def test_no_source_is_off_by_more_than_one_after_any_number_of_places(weights: list[int]) -> None:
    mixture = Mixture(weights)
    source_N, index_N = mixture.locate(np.arange(3 * sum(weights)))
    counts = np.zeros(len(weights), dtype=int)
    for place, (source, index) in enumerate(zip(source_N.tolist(), index_N.tolist())):
        assert index == counts[source]  # each sequence of a source once, in order
        counts[source] += 1
        assert mixture.counts(place + 1) == counts.tolist()
        assert np.abs(counts - fractions(mixture, place + 1)).max() <= 1
    assert (counts == 3 * np.array(weights)).all()


def test_no_source_is_off_by_one_for_any_weights() -> None:
    """Every source is off by less than one anywhere in 10^9 positions: for random weights with ratios up to 10^6, and
    for powers, the worst case of trees."""
    generator = np.random.default_rng(0)
    for number in range(200):
        size = int(generator.integers(1, 51))
        weights = [1 + int(1e6 * x) for x in generator.random(size) ** generator.choice([1, 3, 8, 20])]
        if number % 4 == 0:
            weights = [int(10 * generator.uniform(1.02, 2.5) ** power) for power in range(min(size, 18))]
        mixture = Mixture(weights)
        for positions in generator.integers(0, 10**9, 5).tolist():
            counts = mixture.counts(positions)
            assert sum(counts) == positions
            assert np.abs(counts - fractions(mixture, positions)).max() < 1 + 1e-6


def test_any_place_of_a_thousand_million_is_found_alone() -> None:
    weights = np.random.default_rng(1).integers(1, 10**7, 50).tolist()
    mixture, first = Mixture(weights), 987_654_321
    source_N, index_N = mixture.locate(np.arange(first, first + 500))
    before = np.array(mixture.counts(first))
    for number, (source, index) in enumerate(zip(source_N.tolist(), index_N.tolist())):
        assert index == before[source]
        before[source] += 1
        if number % 100 == 0:
            assert mixture.counts(first + number + 1) == before.tolist()


def test_weights_are_taken_as_they_are_written() -> None:
    assert integer_weights([0.1, 0.7, 0.2]) == [1, 7, 2]
    assert Mixture(integer_weights([3, 0.5])).weights == [6, 1]
    large = Mixture([10**12, 3 * 10**12, 1])
    assert 0 < sum(large.weights) < 1 << 30
    assert large.weights[1] / large.weights[0] == pytest.approx(3)
    for wrong in ([0, 0], [1, -1]):
        with pytest.raises(ValueError, match="weights must not be negative"):
            Mixture(wrong)


def test_neighbouring_places_alternate() -> None:
    """Sources of equal weight alternate, so every batch has the mixture."""
    source_N, _ = Mixture([1, 1]).locate(np.arange(100))
    assert all(a != b for a, b in pairwise(source_N.tolist()))


# Weights for which rounding in a tree of sources is off by more than one: equal ones, ratios near the golden section,
# powers.
HARD = [
    [1] * 45,
    [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89],
    [3, 5, 8, 13, 19, 29, 44, 66, 99, 149, 224, 337],
    [round(1e5 * 1.62**power) for power in range(14)],
]


def assert_off_by_less_than_one(weights: list[int], start: int, positions: int) -> None:
    """Asserts in integer arithmetic that counts are off by less than one, and that each source's sequences come once
    and in order."""
    order, total = Mixture(weights), sum(weights)
    counts = order.counts(start)
    assert sum(counts) == start
    source_N, index_N = order.locate(np.arange(start, start + positions))
    for place, (source, index) in enumerate(zip(source_N.tolist(), index_N.tolist()), start + 1):
        assert index == counts[source]
        counts[source] += 1
        assert all(abs(count * total - place * weight) < total for count, weight in zip(counts, weights))
    assert order.counts(start + positions) == counts


@pytest.mark.parametrize("weights", [*HARD, *MIXTURES], ids=str)
def test_earliest_deadlines_are_off_by_less_than_one(weights: list[int]) -> None:
    for start in (0, 987_654_321, 10**12 + 7):
        assert_off_by_less_than_one(weights, start, 400)


def test_blocks_fit_together_for_any_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring blocks fit together, for mixtures of one and of two groups."""
    monkeypatch.setattr(module, "_LEAST", 1)
    generator, groups = np.random.default_rng(3), set()
    for _ in range(150):
        size = int(generator.integers(1, 15))
        weights = [
            1 + int(generator.choice([30, 300, 3000]) * x) for x in generator.random(size) ** generator.choice([1, 5])
        ]
        assert_off_by_less_than_one(weights, int(generator.choice([0, generator.integers(10**10)])), 300)
        groups.add(len(Mixture(weights)._groups))
    assert groups == {1, 2}


def test_a_place_is_found_in_a_block_of_few() -> None:
    """A block holds fewer than 500 positions, at 2 microseconds per position: a search among 10^9 rows of 50 sources
    takes less than 1 ms.

    The weights are between 1 and 10^7, those of Zipf's law, and powers with ratios up to 10^4.
    """
    generator = np.random.default_rng(1)
    zipf = [round(1e6 / rank) for rank in range(1, 51)]
    for weights in generator.integers(1, 10**7, 50).tolist(), zipf, [round(1e5 * 1.62**power) for power in range(20)]:
        assert sum(len(group._block(10**6)[1]) for group in Mixture(weights)._groups) < 500
