"""Reduces the points of a curve, but keeps peaks and gaps."""

import itertools
from collections.abc import Sequence

import numpy as np


def downsample(values: Sequence[float | None], most: int) -> list[int]:
    """Selects at most `max(5, most)` indices of `values`, in ascending order.

    Selects all indices of at most `most` values. Otherwise, selects the ends, the extremes and the first gap of each
    bucket of neighbouring values.
    """
    if len(values) <= most:
        return list(range(len(values)))
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    finite = np.isfinite(array)
    low, high = np.where(finite, array, np.inf), np.where(finite, array, -np.inf)
    edges = np.linspace(0, len(values), max(1, most // 5) + 1).astype(int).tolist()
    selected: list[int] = []
    for start, end in itertools.pairwise(edges):
        chosen = {start, end - 1, start + int(low[start:end].argmin()), start + int(high[start:end].argmax())}
        if not finite[start:end].all():
            chosen.add(start + int(finite[start:end].argmin()))
        selected += sorted(chosen)
    return selected
