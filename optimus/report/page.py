"""Builds the HTML page that reports one run or compares several runs."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import yaml

from optimus.config.yaml_text import Dumper
from optimus.copies import is_url, url_text
from optimus.disk import printable, user_path
from optimus.errors import UserError, naming_disk_errors
from optimus.report.compare import differences, has_other_tokenizer
from optimus.report.downsample import downsample
from optimus.report.folder import RunFolder, is_number, mapping, number, plain, read_folder
from optimus.report.verdict import compared, large_numbers, median_rate, verdict

_POINTS = 2500  # maximum number of points of a curve
_STACKED = 600  # maximum number of steps of a stacked chart; number of intervals of `_clock`
_CELLS = 400_000  # approximate maximum number of cells in a run's heat map of experts
_STATIC = Path(__file__).with_name("static")

# (group, title, unit, metrics), in the order of the page.
_CHARTS = [
    ("Training", "Loss", "nats per token", ["loss"]),
    ("Training", "Learning rate", "", ["lr"]),
    ("Training", "Gradient norm", "", ["grad_norm"]),
    ("Training", "Skipped steps", "so far", ["skipped_steps"]),
    ("Training", "Loss scale", "of the next step", ["loss_scale"]),
    ("Training", "Overflows of scaled gradients", "steps so far", ["overflow_steps"]),
    ("Speed", "Tokens per second", "tokens/s", ["tokens_per_second"]),
    ("Speed", "Utilisation", "of the peak", ["model_flops_utilization"]),
    ("Speed", "Time of a step", "s", ["step_seconds"]),
    ("Router", "Balance loss", "", ["balance_loss"]),
    ("Router", "Router z-loss", "", ["z_loss"]),
    ("Router", "Load imbalance", "max/mean of the tokens of an expert", ["experts/imbalance", "experts/worst_imbalance"]),
    ("Validation and scores", "Validation", "bits per byte", ["bits_per_byte"]),
]  # fmt: skip
_LAST_GROUP = "Validation and scores"
_STACKS = {  # stacked charts, by the prefix of the metrics' names
    "memory": ("Memory by kind", "on rank 0"),
    "time": ("Time of a step by kind", "on rank 0"),
}
_SIZES = {"layers": "{} layers", "hidden": "hidden {}", "experts": "{} experts"}  # texts in a model's description
_NO_CHART = {"step", "tokens", "time", "data_seconds", "checkpoint_seconds"}
_EXACT = {"lr", "skipped_steps", "loss_scale", "overflow_steps", "phase"}  # metrics that the page never smooths
_ALONE, _COMPARED = "report.html", "comparison.html"  # default names of the files for one run and for several


def write_report(runs: str | Path | Sequence[str | Path], output: str | Path | None = None) -> dict[str, Any]:
    """Writes one HTML file that shows one run, or compares several `runs` (folders or URLs).

    By default, the file is report.html in the run's folder, or comparison.html in the current folder for several runs.
    Returns `output`, the number of `bytes`, and the `warnings` about the runs. Raises `UserError` for no
    runs, a folder that is not a run folder, and one URL without `output`.

    Example:
        api.report(["demo/run"])["output"]
    """
    runs = [runs] if isinstance(runs, str | Path) else runs
    path = Path(_COMPARED)
    if output is not None:
        path = user_path(output)
    elif len(runs) == 1:
        if is_url(runs[0]):
            raise UserError(f"{url_text(runs[0])} is a URL: say with --output where the page goes on this machine")
        path = user_path(runs[0]) / _ALONE
    return write_page(report_data(runs), path)


def write_page(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Writes the page with `data` from `report_data` to `path`. Returns the same as `write_report`."""
    text = render(data)
    with naming_disk_errors(path, "Make room, or choose another place for --output"):
        path.write_text(text, encoding="utf-8")
    return {"output": str(path), "bytes": len(text.encode()), "warnings": data["warnings"]}


def report_data(runs: Sequence[str | Path], *, ended: bool = False) -> dict[str, Any]:
    """Returns the page's data about `runs`, for JSON. For `ended`, and what is raised, see `read_folder`."""
    if not runs:
        raise UserError("a report needs a run folder: name one, or several to compare")
    folders = [read_folder(run, ended=ended) for run in runs]
    names = _distinct_names(folders)
    hidden = {"loss"} if has_other_tokenizer(folders) else set()
    warnings = [
        f"{name}: skipped {number:,} unreadable line{'s' if number > 1 else ''} of {file}"
        for name, folder in zip(names, folders)
        for file, number in folder.skipped_lines.items()
    ]
    if hidden:
        warnings.append(
            "The runs have different tokenizers. Their losses per token are not comparable and not drawn: compare bits per "
            "byte of the validation text."
        )
        if not any(folder.last("bits_per_byte") is not None for folder in folders):
            warnings.append("No run has bits per byte: add a set to `validation` to measure them.")
    several = compared(dict(zip(names, folders)), with_loss=not hidden) if len(folders) > 1 else None
    return {
        "title": f"Report of {names[0]}" if len(names) == 1 else f"{len(names)} runs compared",
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "verdict": verdict(folders[0]) if several is None else several[0],
        "numbers": large_numbers(folders[0]) if several is None else several[1],
        "warnings": warnings,
        "runs": [_run(name, folder, hidden) for name, folder in zip(names, folders)],
        "charts": _charts(folders, hidden),
        "stacks": {key: {"title": title, "unit": unit} for key, (title, unit) in _STACKS.items()},
        "differences": differences(folders),
    }


def render(data: Mapping[str, Any], script: str = "report.js", refresh: float = 0.0, *, curves: bool = True) -> str:
    """Renders the page with `data` from `report_data` and a `script` from `static/`.

    `refresh` is the interval in seconds between requests for new data, or 0 for a page without requests. `curves` is
    True if the script draws curves with uPlot.
    """
    text = json.dumps({**data, "refresh": refresh}, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    embedded = text.replace("<", "\\u003c")  # no text can end the script tag
    template = _templates().get_template("page.html")
    return str(template.render(title=data["title"], data=embedded, script=script, curves=curves))


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(loader=FileSystemLoader(_STATIC), autoescape=True, undefined=StrictUndefined)


def _distinct_names(folders: Sequence[RunFolder]) -> list[str]:
    """Returns the names of the folders, or the paths if two names are equal."""
    names = [folder.name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [printable(str(folder.path)) for folder in folders]


def _run(name: str, folder: RunFolder, hidden: set[str]) -> dict[str, Any]:
    state, why = folder.state
    return {
        "name": name,
        "folder": printable(str(folder.path)),
        "state": state,
        "why": why,
        "verdict": verdict(folder),
        "facts": facts(folder),
        "records": len(folder.records),
        "superseded": folder.superseded,
        "skipped_lines": folder.skipped_lines,
        "clock": _clock(folder),
        "series": {key: curve(folder, key) for key in _curves(folder) if key not in hidden},
        "stacks": {kind: stack(folder, kind) for kind in _STACKS},
        "experts": expert_loads(folder.experts),
        "samples": sorted(folder.samples, key=lambda each: -each["step"]),
        "events": _events(folder),
        "timeline": _finite(folder.timeline),
        "evaluations": evaluations(folder.evaluations),
        "config": yaml.dump(folder.config, Dumper=Dumper, sort_keys=False, width=120) if folder.config else "",
        "environment": _finite(folder.environment),
    }


def facts(folder: RunFolder) -> dict[str, Any]:
    """Summarises a run in numbers and texts."""
    model = mapping(folder.setting("model"))
    sizes = [form.format(size) for key, form in _SIZES.items() if (size := number(model.get(key)))]
    return {
        "model": ", ".join(filter(None, [_text(model.get("family")), *sizes])) or None,
        "parameters": plain(number(folder.described("parameters"))),
        "active_parameters": plain(number(folder.described("active_parameters"))),
        "step": folder.step,
        "steps": folder.steps,
        "tokens": plain(folder.last("tokens")),
        "loss": plain(folder.last("loss")),
        "bits_per_byte": plain(folder.last("bits_per_byte")),
        "tokens_per_second": plain(median_rate(folder)),
        "ranks": plain(number(folder.described("ranks"))),
        "device": _text(folder.described("device")),
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _curves(folder: RunFolder) -> list[str]:
    names = [key for key in folder.metrics if key not in _NO_CHART and key.split("/")[0] not in _STACKS]
    return [key for key in names if folder.column(key).count(None) < len(folder.records)]


def _charts(folders: Sequence[RunFolder], hidden: set[str]) -> list[dict[str, Any]]:
    there = list(dict.fromkeys(key for folder in folders for key in _curves(folder) if key not in hidden))
    known = {key for _, _, _, keys in _CHARTS for key in keys}
    rows = [*_CHARTS, *((_LAST_GROUP, key.replace("_", " "), "", [key]) for key in there if key not in known)]
    charts = [
        {
            "group": group,
            "title": title,
            "unit": unit,
            "keys": shown,
            "exact": _EXACT.issuperset(shown),
            "zero": all(set(folder.column(key)) <= {0, None} for folder in folders for key in shown),
        }
        for group, title, unit, keys in rows
        if (shown := [key for key in keys if key in there])
    ]
    return charts


def curve(folder: RunFolder, key: str) -> dict[str, list[Any]]:
    """Returns `step` and `value` of at most `_POINTS` points of a metric.

    A missing value is None, but a metric with more missing than present values omits the missing points.
    """
    values, there = folder.column(key), range(len(folder.records))
    if 2 * values.count(None) > len(values):
        there = [index for index, value in enumerate(values) if value is not None]  # type: ignore[assignment]
        values = [values[index] for index in there]
    selected = downsample(values, _POINTS)
    steps = [folder.records[there[index]]["step"] for index in selected]
    return {"step": steps, "value": [plain(values[index]) for index in selected]}


def _clock(folder: RunFolder) -> dict[str, list[Any]]:
    """Returns `step`, and the `tokens` and `seconds` so far, at evenly spaced records."""
    records, columns = folder.records, [folder.column(key) for key in ("step_seconds", "checkpoint_seconds")]
    sums = list(accumulate((step or 0.0) + (checkpoint or 0.0) for step, checkpoint in zip(*columns)))
    selected = sorted({round(i * (len(records) - 1) / _STACKED) for i in range(_STACKED + 1)} if records else ())
    return {
        "step": [records[index]["step"] for index in selected],
        "tokens": [plain(folder.column("tokens")[index]) for index in selected],
        "seconds": [plain(sums[index]) for index in selected],
    }


def stack(folder: RunFolder, kind: str) -> dict[str, Any] | None:
    """Returns the metrics `kind/...`, the largest first; None without such metrics.

    Returns at most `_STACKED` steps: of each range of steps, the step with the largest sum.
    """
    names = [key for key in folder.metrics if key.startswith(f"{kind}/")]
    if not names:
        return None
    have = [each for each in folder.records if not each.keys().isdisjoint(names)]

    def total(record: Mapping[str, Any]) -> float:
        return sum(value for key in names if is_number(value := record.get(key)) and math.isfinite(value))

    edges = [len(have) * bucket // _STACKED for bucket in range(_STACKED + 1)]
    if len(have) > _STACKED:
        have = [max(have[start:end], key=total) for start, end in pairwise(edges)]
    parts = {key.split("/", 1)[1]: [plain(number(each.get(key))) for each in have] for key in names}
    largest = sorted(parts, key=lambda name: -sum(value for value in parts[name] if is_number(value)))
    return {"step": [each["step"] for each in have], "parts": {name: parts[name] for name in largest}}


def expert_loads(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the tokens of each expert in per cent of its layer's mean: `load[step][layer][expert]`; None without
    experts."""
    layers = sorted({int(layer) for each in records for layer, experts in each["load"].items() if experts})
    if not layers:
        return None
    cells = max(sum(map(len, each["load"].values())) for each in records)
    records = records[:: -(-len(records) * cells // _CELLS)]
    return {
        "step": [each["step"] for each in records],
        "layers": layers,
        "load": [
            [[round(100 * value) for value in each["load"].get(str(layer), ())] for layer in layers] for each in records
        ],
    }


def evaluations(files: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the results of `optimus evaluate`: a row per file and task or text."""
    rows = []
    for name, found in files.items():
        tasks, checkpoint, text = (mapping(found.get(key)) for key in ("tasks", "checkpoint", "text"))
        scored = {task: mapping(scores) for task, scores in tasks.items()}
        if is_number(bits := found.get("bits_per_byte")):
            scored[str(text.get("path", "text"))] = {"bits_per_byte": bits}
        for what, scores in scored.items():
            numbers = {key: plain(value) for key, value in scores.items() if is_number(value)}
            step = plain(number(checkpoint.get("step")))
            rows.append({"file": name, "step": step, "what": what, "scores": numbers})
    return rows


def _events(folder: RunFolder) -> list[dict[str, Any]]:
    """Lists the events and the resumes in order of time; events without a time come last."""
    events = [{**each, "step": _step_of(each, folder)} for each in map(_event, folder.events)]
    for each in folder.environment[1:]:
        if type(step := each.get("step")) is int:
            ranks = number(each.get("ranks"))
            detail = None if ranks is None else f"on {ranks:,} rank{'s' if ranks > 1 else ''}"
            events.append(
                _event({"kind": "resume", "time": _seconds(each.get("time")), "step": step, "detail": detail})
            )

    return sorted(events, key=lambda event: event["time"] if is_number(event["time"]) else math.inf)


def _seconds(moment: Any) -> float | None:
    """Converts a time in ISO 8601 to seconds since 1970; None for any other value."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: plain(value) for key in ("time", "step", "seconds") if is_number(value := event.get(key))}
    return (
        {"time": None, "step": None, "seconds": None}
        | numbers
        | {key: _finite(event.get(key)) for key in ("kind", "node", "rank", "detail")}
    )


def _finite(tree: Any) -> Any:
    """Converts the content of a file for JSON: NaN and infinity become text."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_finite(value) for value in tree]
    return plain(tree) if isinstance(tree, float) else tree


def _step_of(event: Mapping[str, Any], folder: RunFolder) -> int | None:
    return event["step"] if event["step"] is not None else folder.step_at(event["time"])
