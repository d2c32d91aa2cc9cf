"""Mixtures: exact counts at every place, found from any place without those before it."""

from itertools import pairwise

import numpy as np
import pytest

from optimus.data import mixture as module
from optimus.data.mixture import Mixture, whole_weights

MIXTURES = [[1], [1, 1], [7, 2, 1], [35, 30, 20, 10, 5], [1000, 1], [1] * 50, [0, 3, 0, 4], [5, 8, 13, 21, 34, 55]]


def fractions(mixture: Mixture, places: int) -> np.ndarray:
    return places * np.array(mixture.weights) / sum(mixture.weights)


@pytest.mark.parametrize("weights", MIXTURES, ids=str)
def test_no_source_is_off_by_more_than_one_after_any_number_of_places(weights: list[int]) -> None:
    mixture = Mixture(weights)
    source_N, index_N = mixture.locate(np.arange(3 * sum(weights)))
    counts = np.zeros(len(weights), dtype=int)
    for place, (source, index) in enumerate(zip(source_N.tolist(), index_N.tolist())):
        assert index == counts[source]  # every sequence of a source once, in order
        counts[source] += 1
        assert mixture.counts(place + 1) == counts.tolist()
        assert np.abs(counts - fractions(mixture, place + 1)).max() <= 1
    assert (counts == 3 * np.array(weights)).all()


def test_the_error_is_bounded_for_any_weights() -> None:
    """By `error`, which is 1 for three sources and never much more; whatever the ratios of the weights are."""
    generator = np.random.default_rng(0)
    for number in range(200):
        size = int(generator.integers(1, 51))
        weights = [1 + int(1e6 * x) for x in generator.random(size) ** generator.choice([1, 3, 8, 20])]
        if number % 4 == 0:
            weights = [int(10 * generator.uniform(1.02, 2.5) ** power) for power in range(min(size, 18))]
        mixture = Mixture(weights)
        assert mixture.error <= (1 if size < 4 else 1.25)
        assert mixture.error <= 1 or sum(mixture.weights) > 1 << 14
        for places in generator.integers(0, 10**9, 20).tolist():
            counts = mixture.counts(places)
            assert sum(counts) == places
            assert np.abs(counts - fractions(mixture, places)).max() <= mixture.error + 1e-6


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


def test_seeking_takes_a_path_through_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One place of 10^9 rows of 50 sources: some 20 of the array operations that take 5 microseconds each."""
    mixture = Mixture(np.random.default_rng(1).integers(1, 10**7, 50).tolist())
    calls, original = [], module._of_left
    monkeypatch.setattr(module, "_of_left", lambda *given: calls.append(1) or original(*given))
    mixture.locate(np.array([987_654_321]))
    assert 2 <= len(calls) <= 2 * 12


def test_weights_are_taken_as_they_are_written() -> None:
    assert whole_weights([0.1, 0.7, 0.2]) == [1, 7, 2]
    assert Mixture(whole_weights([3, 0.5])).weights == [6, 1]
    large = Mixture([10**12, 3 * 10**12, 1])
    assert 0 < sum(large.weights) < 1 << 30
    assert large.weights[1] / large.weights[0] == pytest.approx(3)
    for wrong in ([0, 0], [1, -1]):
        with pytest.raises(ValueError, match="weights must not be negative"):
            Mixture(wrong)


def test_neighbouring_places_alternate() -> None:
    """Equal sources take turns, so that every batch has the mixture."""
    source_N, _ = Mixture([1, 1]).locate(np.arange(100))
    assert all(a != b for a, b in pairwise(source_N.tolist()))


# Trees are off by more than one here: equal sources, ratios near the golden section, one source beside many.
OFF_WITH_TREES = [[1] * 45, [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89], [3, 5, 8, 13, 19, 29, 44, 66, 99, 149, 224, 337]]


@pytest.mark.parametrize("weights", [*OFF_WITH_TREES, *MIXTURES], ids=str)
def test_earliest_deadlines_are_off_by_less_than_one(weights: list[int]) -> None:
    """There is a schedule that is off by 1 - 1 / (2 n - 2) at most (Tijdeman 1980); the error of ours is found exactly."""
    table, period = module._Table(weights), sum(weights)
    source_N, index_N = table.locate(np.arange(2 * period))
    counts_NK = np.cumsum(source_N[:, None] == np.arange(len(weights)), axis=0)
    off_NK = counts_NK - np.arange(1, 2 * period + 1)[:, None] * np.array(weights) / period
    assert np.abs(off_NK).max() < 1
    assert table.error == pytest.approx(np.abs(off_NK).max())
    for place in range(0, 2 * period, 1 + period // 7):
        assert table.counts(place + 1) == counts_NK[place].tolist()
        assert index_N[place] == counts_NK[place, source_N[place]] - 1


def test_a_table_is_taken_where_trees_are_off_by_more_than_one() -> None:
    for size in range(1, 65):
        assert Mixture([1] * size).error <= 1
    weights = OFF_WITH_TREES[0]
    assert module._Tree(weights).error > 1 > Mixture(weights).error
    far = np.arange(10**12, 10**12 + 100)
    source_N, index_N = Mixture(weights).locate(far)
    assert (np.array(Mixture(weights).counts(10**12 + 100)) - Mixture(weights).counts(10**12)).tolist() == np.bincount(
        source_N, minlength=len(weights)
    ).tolist()
    assert index_N[0] == Mixture(weights).counts(10**12)[source_N[0]]


def test_the_bound_is_that_of_what_happens() -> None:
    """Over all places of mixtures whose bound is near 1, the largest error comes near the bound and never above it."""
    generator = np.random.default_rng(2)
    for _ in range(20):
        mixture = Mixture(generator.integers(1, 300, int(generator.integers(4, 12))).tolist())
        source_N, _ = mixture.locate(np.arange(sum(mixture.weights)))
        one_hot_NK = source_N[:, None] == np.arange(len(mixture.weights))
        share_K = np.array(mixture.weights) / sum(mixture.weights)
        off_NK = one_hot_NK.cumsum(0) - np.arange(1, len(source_N) + 1)[:, None] * share_K
        assert 0.4 < np.abs(off_NK).max() <= mixture.error + 1e-9
