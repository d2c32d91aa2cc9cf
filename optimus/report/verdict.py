"""Summarises a run in a sentence and at most four numbers, or compares several runs."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from optimus.config.sizes import seconds_text
from optimus.report.folder import RunFolder, is_number, plain

_NUMBERS = 4  # maximum number of values that the page shows in large type
_REASON = 100  # maximum number of characters of the reason why a run has ended
_LAST = 100  # maximum number of steps over which the last loss and the median rate are computed


def verdict(folder: RunFolder) -> str:
    """Describes a run's state, steps and time, the best bits per byte (or else the last loss), and the slowest part."""
    state, why = folder.state
    steps = f"{folder.step:,} of {folder.steps:,}" if folder.steps is not None else f"{folder.step:,}"
    said = f"{state} after {steps} steps"
    if (seconds := training_seconds(folder)) > 0:
        said += f" in {seconds_text(seconds)}"
    parts = [said + (f" ({_shortened(why)})" if why else "")]
    best, loss = best_bits(folder), last_loss(folder)
    if best is not None:
        at = "" if best[1] == folder.step else f" at step {best[1]:,}"
        parts.append(f"best {best[0]:.4g} bits per byte{at}")
    elif loss is not None and math.isfinite(loss):
        parts.append(f"loss {loss:.4g}")
    if loss is not None and not math.isfinite(loss):
        parts.append("some of the last losses are not finite")
    if (slowest := _slowest(folder)) is not None:
        parts.append(f"slowest: {slowest[0]}, {100 * slowest[1]:.1f} %")
    return "; ".join(parts)


def large_numbers(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns at most four numbers, each with a `label`, a `value` for JSON, and a `note`."""
    best, over, seconds = best_bits(folder), _last_steps(folder), training_seconds(folder)
    rate, tokens, parameters = median_rate(folder), folder.last("tokens"), folder.described("parameters")
    known: list[tuple[str, float | None, str]] = [
        ("bits per byte", best and best[0], f"best, at step {best[1]:,}" if best else ""),
        ("loss", last_loss(folder), f"mean of the last {over:,} steps" if over > 1 else "of the last step"),
        ("tokens per second", rate, f"median of the last {min(_LAST, len(folder.records)):,} steps"),
        ("tokens", tokens, f"in {seconds_text(seconds)} of training" if seconds > 0 else ""),
        ("steps", float(folder.step), "" if folder.steps is None else f"of {folder.steps:,}"),
        ("parameters", parameters if is_number(parameters) else None, ""),
    ]
    there = [(label, value, note) for label, value, note in known if value is not None]
    return [{"label": label, "value": plain(value), "note": note} for label, value, note in there[:_NUMBERS]]


def compared(runs: Mapping[str, RunFolder], with_loss: bool) -> tuple[str, list[dict[str, Any]]]:
    """Returns (a sentence, at most four numbers) that compare runs. The `note` of a number is the name of a run.

    The keys of `runs` are the names of the runs. `with_loss` is True if the losses of the runs are comparable.
    """
    measures: list[tuple[str, Callable[[RunFolder], float | None], bool]] = [
        ("lowest bits per byte", lambda run: (best := best_bits(run)) and best[0], True),
        ("lowest loss", last_loss if with_loss else lambda _: None, True),
        ("most tokens per second", median_rate, False),
        ("most tokens", lambda run: run.last("tokens"), False),
        ("most steps", lambda run: float(run.step), False),
    ]
    states = Counter(run.state[0] for run in runs.values())
    parts = [", ".join(f"{number} {state}" for state, number in states.items())]
    found = []
    for label, measure, low in measures:
        values = {
            name: value for name, run in runs.items() if (value := measure(run)) is not None and math.isfinite(value)
        }
        if values:
            name = min(values, key=lambda name: values[name] if low else -values[name])
            found.append({"label": label, "value": values[name], "note": name})
    of = {each["label"]: each for each in found}
    if (each := of.get("lowest bits per byte")) is not None:
        parts.append(f"best: {each['note']}, {each['value']:.4g} bits per byte")
    elif (each := of.get("lowest loss")) is not None:
        parts.append(f"best: {each['note']}, loss {each['value']:.4g}")
    if (each := of.get("most tokens per second")) is not None:
        parts.append(f"fastest: {each['note']}, {each['value']:,.0f} tokens/s")
    return "; ".join(parts), found[:_NUMBERS]


def best_bits(folder: RunFolder) -> tuple[float, int] | None:
    """Returns (lowest bits per byte, step) for the first validation set that has finite values, or None."""
    for key in ("bits_per_byte", *(name for name in folder.metrics if name.startswith("bits_per_byte/"))):
        pairs = zip(folder.column(key), folder.records)
        found = [(value, each["step"]) for value, each in pairs if value is not None and math.isfinite(value)]
        if found:
            return min(found)
    return None


def last_loss(folder: RunFolder) -> float | None:
    """Returns the mean loss over the last tenth of the recorded steps (1 to 100 steps), or None without a loss."""
    values = [value for value in folder.column("loss")[-_last_steps(folder) :] if value is not None]
    return sum(values) / len(values) if values else None


def median_rate(folder: RunFolder) -> float | None:
    """Returns the median tokens per second over the last 100 recorded steps, or None without a rate."""
    rates = [value for value in folder.column("tokens_per_second")[-_LAST:] if value is not None]
    return median(rates) if rates else None


def training_seconds(folder: RunFolder) -> float:
    """Returns the total recorded seconds of the run's steps and checkpoints."""
    columns = (folder.column("step_seconds"), folder.column("checkpoint_seconds"))
    return sum(value for column in columns for value in column if value is not None and math.isfinite(value))


def _shortened(why: str) -> str:
    return why if len(why) <= _REASON else f"{why[: _REASON - 1].rstrip()}…"


def _last_steps(folder: RunFolder) -> int:
    return max(1, min(_LAST, len(folder.records) // 10))


def _slowest(folder: RunFolder) -> tuple[str, float] | None:
    """Returns (name, share) of the largest part of the steps' measured time, or None."""
    sums = {
        name.removeprefix("time/"): sum(
            value for value in folder.column(name) if value is not None and math.isfinite(value)
        )
        for name in folder.metrics
        if name.startswith("time/")
    }
    total = sum(sums.values())
    if not math.isfinite(total) or total <= 0:
        return None
    name = max(sums, key=lambda name: sums[name])
    return name.replace("_", " "), sums[name] / total
