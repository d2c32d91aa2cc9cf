"""Predicts the time to solution: until a run has trained a number of tokens, or until its loss is low enough.

A loss is reached after the tokens that a loss curve says. The curve is measured (a run's metrics, or a CSV file) or a law
L(D) = E + B / D^beta of the tokens D (Hoffmann et al. 2022, equation 2, for one model). Within a measured curve the tokens
are read from the curve, beyond its end from the law fitted to it.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optimus.config.sizes import count_text
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.plan.prediction import Plan

_FITTED = 10  # the last tokens over the first tokens that a fit takes: earlier ones are a run's warm-up
_BINS = 40  # means of the measured losses, at equal distances of the logarithm of the tokens
_FEWEST = 5  # of these means, for a law of three numbers
_LEAST, _MOST = 0.01, 3.0  # exponents that a fit tries


class LossLaw(NamedTuple):
    """The law L(D) = floor + factor / D^exponent of a loss after D tokens."""

    floor: float
    factor: float
    exponent: float

    def loss(self, tokens: float) -> float:
        """Returns the loss after `tokens` tokens."""
        return float(self.floor + self.factor * tokens**-self.exponent)

    def tokens(self, loss: float) -> float:
        """Returns the tokens after which the loss is `loss`; infinity at the floor and below, and beyond any float."""
        if loss <= self.floor:
            return math.inf
        try:
            return float((self.factor / (loss - self.floor)) ** (1 / self.exponent))
        except OverflowError:
            return math.inf

    def __str__(self) -> str:
        return f"{self.floor:.4g} + {self.factor:.4g} / tokens^{self.exponent:.4g}"


@dataclass(frozen=True)
class Solution:
    """The end of a run: `target` as requested, the tokens that it takes, and how they were found."""

    target: str
    tokens: float
    why: str

    def steps(self, plan: Plan) -> int:
        """Returns the number of steps of `plan` until the end."""
        return math.ceil(self.tokens / plan.job.tokens)

    def seconds(self, plan: Plan) -> float:
        """Returns the seconds of the steps of `plan` until the end."""
        return self.steps(plan) * plan.step.seconds

    def device_hours(self, plan: Plan) -> float:
        """Returns the hours of all ranks of `plan` until the end."""
        return self.seconds(plan) / 3600 * plan.job.mesh.size


def solution_of(until: str | None, curve: str | None) -> Solution:
    """Returns where a run ends, from `tokens=N`, or from `loss=X` and a loss curve.

    `curve` is the path of a metrics.jsonl or of a CSV file with the columns `tokens` and `loss`, or a law
    `E=...,B=...,beta=...`. Raises `UserError` for another request, an invalid curve, and a loss that the curve does not
    reach.
    """
    kind, equals, text = (until or "").partition("=")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if kind not in ("tokens", "loss") or not equals or not 0 < value < math.inf:
        said = "is missing, but --loss-curve is given" if until is None else str(until)
        raise UserError(f"--until {said}: give tokens=N, such as tokens=2e12, or loss=X, such as loss=2.5")
    if kind == "tokens":
        if curve is not None:
            raise UserError(f"--loss-curve is for --until loss=X, not for {until}: leave it out")
        return Solution(f"tokens={text}", value, "as requested")
    if curve is None:
        raise UserError(
            f"--until {until}: add --loss-curve, a file with losses by tokens or a law such as E=1.7,B=500,beta=0.3"
        )
    tokens, why = _tokens_until(value, curve)
    if not math.isfinite(tokens):
        raise UserError(f"--until {until}: the loss never gets there, or takes more than 1e308 tokens: {why}")
    return Solution(f"loss={text}", tokens, why)


def _tokens_until(loss: float, curve: str) -> tuple[float, str]:
    if "=" in curve and not user_path(curve).exists():
        law = read_law(curve)
        return law.tokens(loss), f"by the law {law}"
    points = binned(read_curve(Path(curve)))
    if (crossing := crossed(points, loss)) is not None:
        return crossing, f"read from {curve}"
    law, last = fitted(points, curve), points[-1][0]
    tokens = law.tokens(loss)
    beyond = "" if math.isinf(tokens) else f", {tokens / last:.3g} times the tokens of the curve"
    return tokens, f"by the law {law}, fitted to {curve}{beyond}"


def read_law(text: str) -> LossLaw:
    """Reads a law `E=...,B=...,beta=...`. Raises `UserError` for another text and for numbers below 0."""
    given = dict[str, float]()
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            given[name.strip()] = float(value)
        except ValueError:
            given[name.strip()] = math.nan
    law = LossLaw(*(given.get(name, math.nan) for name in ("E", "B", "beta")))
    if len(given) != len(law) or not (0 <= law.floor < math.inf and all(0 < each < math.inf for each in law[1:])):
        raise UserError(
            f"--loss-curve {text}: give a file, or the law E + B / tokens^beta with E of at least 0 and B and beta above 0, "
            "such as E=1.7,B=500,beta=0.3"
        )
    return law


# ---- Measured curves ----


def read_curve(path: Path) -> list[tuple[float, float]]:
    """Reads (tokens, loss) of each line of a metrics.jsonl or CSV file, by ascending tokens. Lines without a loss are
    left out.

    Raises `UserError` when the file cannot be read or has fewer than two points.
    """
    path = user_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--loss-curve {path} cannot be read: {error}") from None
    rows: Iterable[Mapping[str, Any]] = (
        _lines(text, path) if path.suffix == ".jsonl" else csv.DictReader(text.splitlines())
    )
    points = []
    for number, row in enumerate(rows, start=1):
        try:
            tokens, loss = row["tokens"], row["loss"]
            if tokens not in (None, "") and loss not in (None, ""):
                points.append((float(tokens), float(loss)))
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"--loss-curve {path}, record {number}: there is no number of tokens or no loss: a metrics.jsonl has both, "
                "a CSV file has the columns tokens and loss"
            ) from None
    points = sorted((tokens, loss) for tokens, loss in points if tokens > 0 and math.isfinite(loss))
    if len(points) < 2:
        raise UserError(f"--loss-curve {path}: there are fewer than two points with tokens and loss")
    return points


def _lines(text: str, path: Path) -> Iterator[dict[str, float]]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise UserError(f"--loss-curve {path}, line {number}: {error}") from None


def binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns means of the losses in up to `_BINS` intervals of equal length of the logarithm of the tokens."""
    tokens, losses = (np.asarray(values, dtype=np.float64) for values in zip(*points))
    logs = np.log(tokens)
    edges = np.linspace(logs[0], logs[-1], _BINS + 1)
    interval = np.clip(np.searchsorted(edges, logs, side="right") - 1, 0, _BINS - 1)
    return [
        (float(np.exp(logs[interval == each].mean())), float(losses[interval == each].mean()))
        for each in np.unique(interval)
    ]


def crossed(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Returns the tokens at which the lowest loss so far first is at most `loss`, or None if it never is.

    The loss between two points is linear in the logarithm of the tokens.
    """
    before = points[0]
    if before[1] <= loss:
        return before[0]
    for tokens, found in points[1:]:
        if found <= loss:
            share = (before[1] - loss) / (before[1] - found)
            return math.exp(math.log(before[0]) + share * (math.log(tokens) - math.log(before[0])))
        if found < before[1]:
            before = tokens, found
    return None


def fitted(points: Sequence[tuple[float, float]], name: str = "the curve") -> LossLaw:
    """Fits the law to the points of the last `_FITTED`-fold tokens by least squares of the losses.

    For each exponent the floor and the factor are a linear problem; the exponent is searched. Raises `UserError` for too
    few points, and for losses that do not fall.
    """
    late = [(tokens, loss) for tokens, loss in points if tokens * _FITTED >= points[-1][0]]
    if len(late) < _FEWEST:
        raise UserError(
            f"--loss-curve {name}: {len(late)} points of the last nine tenths of its tokens are too few for the law beyond "
            f"its end: give at least {_FEWEST}, or a loss that it reaches"
        )
    tokens, losses = (np.asarray(values, dtype=np.float64) for values in zip(*late))
    scale = tokens[-1]

    def solved(exponent: float) -> tuple[float, float, float]:
        powers = (tokens / scale) ** -exponent
        spread = powers - powers.mean()
        factor = float(spread @ losses / (spread @ spread))
        floor = float(losses.mean() - factor * powers.mean())
        if floor < 0:
            floor, factor = 0.0, float(powers @ losses / (powers @ powers))
        return float(((losses - floor - factor * powers) ** 2).sum()), floor, factor

    low, high = math.log(_LEAST), math.log(_MOST)
    for _ in range(4):  # grids within the neighbours of the best before
        grid = np.linspace(low, high, 200)
        best = int(np.argmin([solved(math.exp(each))[0] for each in grid]))
        low, high = float(grid[max(0, best - 1)]), float(grid[min(len(grid) - 1, best + 1)])
    exponent = math.exp((low + high) / 2)
    _, floor, factor = solved(exponent)
    if factor <= 0:
        raise UserError(f"--loss-curve {name}: its losses do not fall, so nothing says when the loss is lower")
    return LossLaw(floor, factor * float(scale**exponent), exponent)


def said(solution: Solution) -> str:
    """Returns a sentence on how the tokens were found."""
    return f"Until {solution.target}: {count_text(solution.tokens)} tokens, {solution.why}."
