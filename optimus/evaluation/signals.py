"""Measures how early and how reliably tasks distinguish runs.

The measures follow FineWeb2 (Penedo et al. 2025) and "Signal and Noise" (Heineman et al. 2025).

Legend: N measurements of a run, R runs, U distinct values.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.disk import user_path
from optimus.errors import UserError, naming_disk_errors
from optimus.observe.metrics import read_metrics

_LOWER_IS_BETTER = ("bits_per_byte",)
_LEAST = 3  # each run needs a metric with at least this many measurements


class TaskCurve(NamedTuple):
    """A metric of a task in one run."""

    step_N: NDArray[np.int64]
    value_N: NDArray[np.float64]


TaskCurves = dict[tuple[str, str], list[TaskCurve]]  # one curve per run, by task and metric


def read_curves(runs: Sequence[str | Path]) -> TaskCurves:
    """Reads the tasks' metrics that all `runs` have."""
    found: list[dict[tuple[str, str], TaskCurve]] = []
    for given in runs:
        folder = user_path(given)
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder} is not a run folder: it has no metrics.jsonl. Name the folders of runs")
        points: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for record in read_metrics(folder):
            for key, value in record.items():
                kind, *names = key.split("/")
                if kind == "tasks" and len(names) == 2 and value is not None:  # None: not finite
                    points.setdefault((names[0], names[1]), []).append((record["step"], value))
        if max(map(len, points.values()), default=0) < _LEAST:
            raise UserError(
                f"{folder} has results of tasks at fewer than {_LEAST} steps: set evaluate.tasks, evaluate.task_data and a "
                "smaller evaluate.tasks_every"
            )
        found.append({key: TaskCurve(*map(np.array, zip(*each))) for key, each in points.items()})
    if not found:
        raise UserError("no runs are named: name the folders of runs")
    shared = [key for key in found[0] if all(key in each for each in found)]
    if not shared:
        raise UserError("the runs have no task in common: give runs with the same evaluate.tasks")
    return {key: [each[key] for each in found] for key in shared}


def signals(curves: TaskCurves) -> list[dict[str, Any]]:
    """Returns a row per task and metric.

    `spearman` is the rank correlation of the metric (bits per byte negated) with the step, averaged over the runs.

    `noise` estimates the standard deviation of a measurement, averaged over the runs with at least three measurements.
    `noise` is None without such a run.

    `kendall` is the tau-b between the runs' rankings at an earlier common step and at the last common step, averaged
    over the earlier steps. `kendall` is None for fewer than two runs or fewer than two common steps.
    """
    rows = []
    for (task, metric), each in curves.items():
        sign = -1.0 if metric in _LOWER_IS_BETTER else 1.0
        monotone = fmean(spearman(curve.step_N, sign * curve.value_N) for curve in each)
        deviations = [found for found in map(noise, each) if found is not None]
        scatter = fmean(deviations) if deviations else None
        rows.append(
            {"task": task, "metric": metric, "spearman": monotone, "noise": scatter, "kendall": _agreement(each)}
        )
    return rows


def spearman(x_N: NDArray[Any], y_N: NDArray[Any]) -> float:
    """Returns the correlation of the ranks, or 0 if all values in `x_N` or in `y_N` are equal.

    Equal values share the mean of their ranks.
    """
    ranks = [_ranks(values) - (len(values) - 1) / 2 for values in (x_N, y_N)]
    size = float(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / size if size else 0.0


def kendall(x_R: NDArray[Any], y_R: NDArray[Any]) -> float:
    """Returns tau-b, or 0 if all pairs in `x_R` or all pairs in `y_R` are ties."""
    first, second = np.triu_indices(len(x_R), 1)
    x_sign, y_sign = np.sign(x_R[first] - x_R[second]), np.sign(y_R[first] - y_R[second])
    size = float(np.sqrt((x_sign != 0).sum() * (y_sign != 0).sum()))
    return float((x_sign * y_sign).sum()) / size if size else 0.0


def noise(curve: TaskCurve) -> float | None:
    """Estimates the standard deviation of a measurement from its distance to the line through its two neighbours.

    At equally spaced steps, independent errors of standard deviation s give distances of standard deviation
    s * sqrt(3 / 2). Returns None for fewer than three measurements.
    """
    before, at, after = curve.step_N[:-2], curve.step_N[1:-1], curve.step_N[2:]
    part = (at - before) / (after - before)
    value = curve.value_N
    distance = value[1:-1] - (value[:-2] * (1 - part) + value[2:] * part)
    return float(np.sqrt(np.mean(distance**2 / (1 + part**2 + (1 - part) ** 2)))) if len(distance) else None


def draw(curves: TaskCurves, runs: Sequence[str | Path], path: Path) -> None:
    """Draws the curves to `path`, a PNG: a row per task, a column per metric, a line per run."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(task for task, _ in curves))
    metrics = list(dict.fromkeys(metric for _, metric in curves))
    figure = Figure(figsize=(3.2 * len(metrics), 2.4 * len(tasks)), layout="constrained")
    grid = figure.subplots(len(tasks), len(metrics), squeeze=False)
    for (task, metric), each in curves.items():
        axes = grid[tasks.index(task)][metrics.index(metric)]
        axes.set(title=f"{task}: {metric}", xlabel="step")
        for run, curve in zip(runs, each):
            axes.plot(curve.step_N, curve.value_N, ".-", label=Path(run).name)
    grid[0][0].legend()
    with naming_disk_errors(path, "Make room, or choose another place"):
        figure.savefig(path, dpi=120)


def _ranks(values_N: NDArray[Any]) -> NDArray[np.float64]:
    _, inverse_N, count_U = np.unique(values_N, return_inverse=True, return_counts=True)
    last_U = np.cumsum(count_U) - 1
    ranks: NDArray[np.float64] = (last_U - (count_U - 1) / 2)[inverse_N]
    return ranks


def _agreement(curves: Sequence[TaskCurve]) -> float | None:
    steps = sorted(set.intersection(*(set(curve.step_N.tolist()) for curve in curves)))
    if len(curves) < 2 or len(steps) < 2:
        return None
    values = [np.array([curve.value_N[curve.step_N == step][0] for curve in curves]) for step in steps]
    return fmean(kendall(each, values[-1]) for each in values[:-1])
