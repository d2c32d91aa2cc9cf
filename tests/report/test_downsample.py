"""Downsampled curves keep every peak, every gap and both ends."""

import math
import random

import pytest

from optimus.report.downsample import downsample


def test_few_points_stay() -> None:
    assert downsample([3.0, None, 1.0], 10) == [0, 1, 2]


@pytest.mark.parametrize("place", [0, 1, 517, 99_998, 99_999])
@pytest.mark.parametrize("odd", [-50.0, 50.0, None, math.nan, math.inf])
def test_what_is_odd_stays(place: int, odd: float | None) -> None:
    draw = random.Random(0)
    values: list[float | None] = [draw.gauss(0, 1) for _ in range(100_000)]
    values[place] = odd
    kept = downsample(values, 2500)
    assert place in kept
    assert {0, 99_999} <= set(kept)
    assert kept == sorted(set(kept))
    assert len(kept) <= 2500


def test_nothing_finite() -> None:
    assert len(downsample([math.nan] * 1000, 50)) <= 50
