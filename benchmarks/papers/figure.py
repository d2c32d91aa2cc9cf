"""Figures and tables of papers: published numbers, and what the planner predicts for the same question."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from benchmarks.statistics import rank_correlation

_RANKED = 5  # a rank correlation needs more points


class Point(NamedTuple):
    """A number in a paper, or a range of numbers from `published` to `highest`, and the prediction."""

    what: str
    published: float
    predicted: float
    highest: float | None = None

    @property
    def error(self) -> float:
        """The relative error of the prediction, positive if it is too high; 0 within a published range."""
        high = self.published if self.highest is None else self.highest
        nearest = min(max(self.predicted, self.published), high)
        return self.predicted / nearest - 1

    @property
    def said(self) -> str:
        """The published number or range as text."""
        return f"{self.published:g}" if self.highest is None else f"{self.published:g} to {self.highest:g}"


@dataclass(frozen=True)
class Figure:
    """A figure or table: its name, the unit of its numbers, a function that predicts them, the assumptions where the paper
    states no value, and the reasons for what is off."""

    name: str
    unit: str
    points: Callable[[], Sequence[Point]]
    assumed: str = ""
    misses: str = ""


def summary(figure: Figure, points: Sequence[Point]) -> dict[str, Any]:
    """Returns the row of a figure: number of points, rank correlation (of more than five points), errors."""
    middles = [point.published if point.highest is None else (point.published + point.highest) / 2 for point in points]
    ranked = len(points) > _RANKED
    return {
        "figure": figure.name,
        "unit": figure.unit,
        "points": len(points),
        "rank_correlation": rank_correlation([point.predicted for point in points], middles) if ranked else None,
        "median_error": median(abs(point.error) for point in points),
        "largest_error": max((point.error for point in points), key=abs),
    }
