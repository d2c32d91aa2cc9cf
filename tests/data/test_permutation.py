"""The permutation is a bijection with the statistics of a uniform random one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus.data.permutation import Permutation


def excess(counts: np.ndarray, degrees: int) -> float:
    """Returns the chi-square of counts against uniform ones, in standard deviations above its mean (normal
    approximation)."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 31, 32, 33, 64, 65, 1000, 4096, 4097, 300_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_bijective(size: int, seed: int) -> None:
    image = Permutation(size, seed)(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


@given(st.integers(1, 3000), st.integers())
@settings(max_examples=50, deadline=None)
def test_bijective_for_any_size_and_seed(size: int, seed: int) -> None:
    assert len(set(Permutation(size, seed)(np.arange(size)).tolist())) == size


@pytest.mark.parametrize("size", [2 * 10**9, 2**31, 2**31 + 1, 5 * 10**12])
def test_large_sizes_stay_in_range_and_apart(size: int) -> None:
    permutation = Permutation(size, "shuffle", 0)
    image = permutation(np.concatenate([np.arange(50_000), np.arange(size - 50_000, size)]))
    assert image.min() >= 0
    assert image.max() < size
    assert len(np.unique(image)) == 100_000
    assert excess(np.histogram(image, bins=50, range=(0, size))[0], 49) < 4


@pytest.mark.in_turn(2, 3)
def test_all_permutations_of_four_are_equally_likely() -> None:
    weights = 4 ** np.arange(4)
    codes = [int(Permutation(4, seed)(np.arange(4)) @ weights) for seed in range(50 * 24)]
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert excess(counts, 23) < 4


@pytest.mark.parametrize("size", [13, 100])
def test_over_seeds_every_place_and_every_distance_is_equally_likely(size: int) -> None:
    images = np.stack([Permutation(size, seed)(np.arange(2)) for seed in range(3000)])
    assert excess(np.bincount(images[:, 0], minlength=size), size - 1) < 4
    distances = (images[:, 1] - images[:, 0]) % size
    assert excess(np.bincount(distances, minlength=size)[1:], size - 2) < 4


@pytest.mark.parametrize("size", [300_000, 2**18])
def test_within_one_permutation_places_and_neighbours_are_independent(size: int) -> None:
    image = Permutation(size, "shuffle", 7)(np.arange(size))
    cell = image * 20 // size
    assert excess(np.bincount(np.arange(size) * 20 // size * 20 + cell, minlength=400), 19 * 19) < 4
    assert excess(np.bincount(cell[:-1] * 20 + cell[1:], minlength=400), 399) < 4
    assert excess(np.histogram(np.diff(image) % size, bins=100, range=(0, size))[0], 99) < 4


def test_keys_differ_and_repeat() -> None:
    indices = np.arange(1000)
    first = Permutation(1000, "epoch", 0, 1)(indices)
    assert np.array_equal(first, Permutation(1000, "epoch", 0, 1)(indices))
    for other in (("epoch", 0, 2), ("epoch", 1, 1), ("shuffle", 0, 1)):
        # Two random permutations agree at one position on average.
        assert (Permutation(1000, *other)(indices) == first).sum() < 10


def test_shape_is_kept_and_range_checked() -> None:
    permutation = Permutation(10, 0)
    assert permutation(np.arange(6).reshape(2, 3)).shape == (2, 3)
    with pytest.raises(IndexError):
        permutation(np.array([10]))


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 4097, 100_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_inverse_maps_images_back(size: int, seed: int) -> None:
    permutation, numbers = Permutation(size, "shuffle", seed), np.arange(size)
    assert np.array_equal(permutation.inverse(permutation(numbers)), numbers)
    assert np.array_equal(permutation(permutation.inverse(numbers)), numbers)
    with pytest.raises(IndexError):
        permutation.inverse(np.array([size]))
