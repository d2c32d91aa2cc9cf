"""Statistics of predictions beside measurements."""

from collections.abc import Sequence


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns Spearman's correlation, or None if all values of either are equal."""
    (a, b), middle = map(_ranks, (first, second)), (len(first) - 1) / 2
    spread = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return sum((x - middle) * (y - middle) for x, y in zip(a, b)) / spread**0.5 if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns the ranks of the values, from 0; equal values share the mean of their ranks."""
    ordered = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(ordered):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]
