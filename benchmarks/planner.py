"""The planner against published throughput, utilisation, memory, and runs that do not fit.

One constant per framework (`speed` in `published/profiles.yaml`) is fitted to such rows; nothing is fitted to single
rows, models or machines. The baseline without a planner is one utilisation for all rows of a source.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.published import Case, excluded, read_cases
from benchmarks.published.jobs import changed
from benchmarks.published.profiles import FrameworkProfile, load_profile
from benchmarks.published.program import framework_memory, job_of, offload_of, on_machine, profile_of
from benchmarks.statistics import rank_correlation
from optimus.errors import UserError
from optimus.model.count import flops_per_token
from optimus.plan.machine import load_machine
from optimus.plan.memory import Memory
from optimus.plan.step import step_time

_T = TypeVar("_T")
_TIMELESS = ("megatron_ci",)  # tiny models, whose steps are the time in which a host starts kernels
_SPREAD = 1.2  # ratio between the two speeds from whose predictions all others follow
_STATE = ("parameters", "gradients", "optimizer", "other")


@dataclass(frozen=True)
class Predicted:
    """A row and its prediction. Speed is in tokens per second of a rank, or None if the row has no comparable speed."""

    case: Case
    tokens_per_second: float | None
    memory: Memory
    fits: bool

    @property
    def allocated(self) -> float:
        """Returns the bytes between steps."""
        return sum(self.memory.parts[kind] for kind in _STATE)

    @property
    def error(self) -> float:
        """Returns the relative error of the throughput, positive for a prediction that is too high."""
        assert self.tokens_per_second is not None
        assert self.case.tokens_per_second is not None
        return self.tokens_per_second / self.case.tokens_per_second - 1

    def utilisation(self, tokens_per_second: float | None) -> float:
        """Returns the share of the 16-bit peak that the model's FLOPs take at this speed."""
        case, machine = self.case, load_machine(self.case.machine)
        flops = flops_per_token(case.model, case.setting.context)
        return (tokens_per_second or 0.0) * flops / machine.rates("bf16").peak


def timed(case: Case) -> bool:
    """Returns whether the row's speed is compared."""
    return case.tokens_per_second is not None and case.source not in _TIMELESS


def throughput(case: Case, profile: FrameworkProfile) -> float:
    """Returns the tokens per second of a rank. Raises `UserError` if no such run is possible."""
    job = job_of(case, on_machine(profile_of(case, profile), load_machine(case.machine)))
    return job.tokens / step_time(job).seconds / job.mesh.size


def predict(case: Case, profile: FrameworkProfile | None = None) -> Predicted:
    """Returns the prediction of a row. Raises `UserError` if no such run is possible."""
    profile = profile or load_profile(case.software)
    framework, offload = profile_of(case, profile), offload_of(case)
    job = job_of(case, framework)
    memory = framework_memory(job, framework, offload)
    least = memory.total
    if "recomputation-unstated" in case.traits:  # fits if some set of recomputed parts fits
        recomputed = changed(job, recompute={"block"})
        least = min(least, framework_memory(recomputed, framework, offload).total)
    speed = throughput(case, profile) if timed(case) else None
    return Predicted(case, speed, memory, least <= load_machine(case.machine).memory)


# ---- The constants ----


class Response:
    """The dependence of predictions on a framework's constant: a step takes about a / speed + b."""

    def __init__(self, cases: Sequence[Case], profile: FrameworkProfile) -> None:
        self.cases, self._speed = cases, profile.speed
        self._slow, self._fast = (
            [throughput(case, profile.model_copy(update={"speed": speed})) for case in cases]
            for speed in (self._speed / _SPREAD, self._speed * _SPREAD)
        )

    def errors(self, speed: float, rows: Sequence[int]) -> list[float]:
        """Returns the relative errors of these rows' throughput with a constant."""
        share = (_SPREAD * self._speed / speed - 1) / (_SPREAD**2 - 1)  # position between fast and slow, in seconds
        return [
            1 / (share / self._slow[row] + (1 - share) / self._fast[row]) / (self.cases[row].tokens_per_second or 1) - 1
            for row in rows
        ]

    def fitted(self, rows: Sequence[int]) -> float:
        """Returns the constant with which as many of these rows are predicted too fast as too slow."""
        low, high = self._speed / 3, self._speed * 3
        for _ in range(40):
            middle = (low * high) ** 0.5
            bias = median(log(max(1e-9, 1 + error)) for error in self.errors(middle, rows))
            low, high = (low, middle) if bias > 0 else (middle, high)
        return (low * high) ** 0.5


def constants(cases: Sequence[Case], seeds: int = 5) -> list[dict[str, Any]]:
    """Returns a row for each framework: the constant in use, the fitted one, and the errors of a cross-validation.

    The cross-validation takes the median error of one half of the rows with the constant of the other half, drawn at
    random `seeds` times.
    """
    table = []
    for name, own in _grouped(cases, lambda case: case.software).items():
        response, every = Response(own, load_profile(name)), range(len(own))
        held_out = []
        for seed in range(seeds if len(own) >= 4 else 0):
            mixed = random.Random(seed).sample(every, len(own))
            fitting, testing = mixed[::2], mixed[1::2]
            held_out.append(_middle(response.errors(response.fitted(fitting), testing)))
        table.append(
            {
                "program": name,
                "rows": len(own),
                "speed": load_profile(name).speed,
                "fitted": response.fitted(every),
                "median_error": _middle(response.errors(response.fitted(every), every)),
                "other_half": median(held_out) if held_out else None,
                "worst_half": max(held_out, default=None),
            }
        )
    return table


# ---- The comparison ----


@dataclass(frozen=True)
class Comparison:
    """The result of `run`: predicted rows, and the reasons why others are left out."""

    predicted: list[Predicted]
    left_out: dict[str, str]

    def sources(self) -> dict[str, dict[str, float | int | None]]:
        """Returns the errors of the throughput by source, as shares of the measured values."""
        found = _grouped(
            [each for each in self.predicted if each.tokens_per_second is not None], lambda each: each.case.source
        )
        return {source: _throughput_errors(rows) for source, rows in found.items()}

    def memory(self) -> dict[str, dict[str, float | int]]:
        """Returns the median errors of peaks and, where measured, of the bytes between steps."""
        found: dict[str, list[float]] = {}
        for each in self.predicted:
            name, case = each.case.source, each.case
            if case.allocated is not None:
                name += ".moe" if case.model.experts else ".gpt"
                found.setdefault(f"{name}.allocated", []).append(each.allocated / case.allocated - 1)
                name += ".peak"
            if case.memory is not None:
                found.setdefault(name, []).append(each.memory.total / case.memory - 1)
        return {
            name: {"rows": len(errors), "median_absolute_error": _middle(errors)}
            for name, errors in sorted(found.items())
        }

    def out_of_memory(self) -> dict[str, int]:
        """Returns the numbers of right and wrong predictions of runs that fit and that do not."""
        right = sum(each.fits != each.case.oom for each in self.predicted)
        return {"right": right, "wrong": len(self.predicted) - right}


def run(folder: Path | None = None) -> Comparison:
    """Predicts the rows of the tables in `folder`, by default those of this checkout.

    Raises `UserError` for a folder without tables, and for an invalid table.
    """
    predicted, left_out = [], dict(excluded(folder))
    for case in read_cases(folder):
        try:
            predicted.append(predict(case))
        except UserError as error:
            left_out[case.row] = str(error)
    return Comparison(predicted, left_out)


def _throughput_errors(rows: Sequence[Predicted]) -> dict[str, float | int | None]:
    measured = [each.utilisation(each.case.tokens_per_second) for each in rows]
    predicted = [each.utilisation(each.tokens_per_second) for each in rows]
    errors = [each.error for each in rows]
    return {
        "rows": len(rows),
        "median_absolute_error": _middle(errors),
        "p90_absolute_error": _percentile([abs(error) for error in errors], 0.9),
        "one_mfu_error": _middle([median(measured) / each - 1 for each in measured]),
        "spearman_mfu": rank_correlation(predicted, measured),
    }


def _grouped(items: Sequence[_T], key: Callable[[_T], str]) -> Mapping[str, list[_T]]:
    found: dict[str, list[_T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return dict(sorted(found.items()))


def _middle(errors: Sequence[float]) -> float:
    return median(map(abs, errors))


def _percentile(values: Sequence[float], share: float) -> float:
    ordered, place = sorted(values), share * (len(values) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
