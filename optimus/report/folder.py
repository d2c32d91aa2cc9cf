"""Reads the files of a run folder, also while the run writes to the folder."""

import math
import os
import socket
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import psutil

from optimus.config.renamed import with_new_names
from optimus.config.yaml_text import parse_yaml
from optimus.copies import local_run
from optimus.disk import parse_json, printable, user_path
from optimus.errors import UserError
from optimus.observe.evaluations import FOLDER, as_metrics, scored_step

_BEAT, _SILENCE = (
    15.0,  # seconds: a younger lease from this host shows a live run, if several processes may have the lease
    60.0,  # seconds: a younger lease from another host shows a live run
)
_TOGETHER = 1000  # lines that `_values` parses at once
_EXPERT_STEPS = 400  # maximum number of steps whose expert loads `read_folder` reads
_SAMPLE_STEPS = 50  # maximum number of validations whose generated text `read_folder` reads
_DIGITS = 16  # integers with fewer digits are exact in JavaScript
_ALLOWED = "\n\r\t"  # control characters that may remain in a text
_RANKS = 1 << 20  # the page draws timelines with fewer ranks
# Kinds of the events that may decide a run's state; `recovered` cancels the reason of an earlier failure.
_ENDINGS = ("failure", "error", "stopped", "recovered", "finished")


@dataclass
class RunFolder:
    """A run as recorded in its files. `records` has the metrics in order of step, each step once."""

    path: Path
    records: list[dict[str, Any]]
    superseded: int  # number of records that a repeated step has replaced
    experts: list[dict[str, Any]]  # expert loads of at most `_EXPERT_STEPS` steps
    samples: list[dict[str, Any]]  # prompts and continuations of at most `_SAMPLE_STEPS` validations
    events: list[dict[str, Any]]
    environment: list[dict[str, Any]]
    config: dict[str, Any]
    timeline: dict[str, Any] | None
    evaluations: dict[str, dict[str, Any]]  # results in `evaluations/`, by file name without ending
    # Numbers of skipped lines, by file name; 1 for a whole damaged file.
    skipped_lines: dict[str, int] = field(default_factory=dict)
    ended: bool = False  # True if the run has ended, whatever its lease says
    _columns: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the folder, with escapes for unprintable characters."""
        return printable(self.path.resolve().name)

    def setting(self, key: str, default: Any = None) -> Any:
        """Returns the configuration's value for a key such as `train.steps`, or `default`."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return default if node is None else node

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the records' fields, in order of appearance."""
        found: dict[str, None] = {}
        for record in self.records:
            if not record.keys() <= found.keys():
                found |= dict.fromkeys(record)
        return list(found)

    def column(self, key: str) -> list[float | None]:
        """Returns a metric's value in each record; None where a record has no number."""
        if key not in self._columns:
            values = [record.get(key) for record in self.records]
            if not set(map(type, values)) <= {float, int, type(None)}:
                values = list(map(number, values))
            self._columns[key] = values
        return self._columns[key]

    @property
    def step(self) -> int:
        """The last step with a record, or 0."""
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def steps(self) -> int | None:
        """The planned number of steps, or None."""
        steps = self.setting("train.steps")
        return steps if type(steps) is int and abs(steps) < 10**_DIGITS else None

    def last(self, key: str) -> float | None:
        """Returns the newest number of a metric, or None."""
        return next((value for each in reversed(self.records) if is_number(value := each.get(key))), None)

    def described(self, key: str) -> Any:
        """Returns an entry of the newest description of the environment, or None."""
        return self.environment[-1].get(key) if self.environment else None

    @cached_property
    def state(self) -> tuple[str, str]:
        """State of the run (running, finished, stopped or failed), and the reason."""
        if not self.ended and _is_held(self.path / "lease.json"):
            return "running", ""
        if self.steps is not None and self.step >= self.steps:
            return "finished", ""
        event = next((each for each in reversed(self.events) if each.get("kind") in _ENDINGS), None)
        kind, detail = (None, "") if event is None else (event["kind"], str(event.get("detail", "")))
        if kind in ("stopped", "finished") or self.step == self.setting("train.stop_at"):
            return "stopped", detail if kind == "stopped" else "at train.stop_at"
        if kind in ("failure", "error"):
            return "failed", detail
        return "failed", "the run left no reason: its process was killed, or its machine was lost"

    def step_at(self, moment: float | None) -> int | None:
        """Returns the last step that was complete at `moment` (seconds since 1970), 0 before the first, None if
        unknown.
        """
        times = [time for time in self.column("time") if time is not None]
        if not isinstance(moment, float | int) or not times or len(times) < len(self.records):
            return None
        index = bisect_right(times, moment)
        return int(self.records[index - 1]["step"]) if index else 0


def read_folder(run_folder: str | Path, *, ended: bool = False) -> RunFolder:
    """Reads a run folder, or the copies of a run at a URL. Leaves out damaged lines and files.

    `ended` is True if the caller knows that the run has ended. Raises `UserError` if the folder is not a run folder, or
    if the file system fails to read a .jsonl file.
    """
    path = user_path(local_run(run_folder))
    if not path.is_dir():
        raise UserError(f"{path} is not a run folder: there is no such folder; name the train.output of a run")
    if not is_run(path):
        raise UserError(
            f"{path} is not a run folder: it has neither metrics.jsonl nor config.yaml with environment.jsonl; name the "
            "train.output of a run, as `optimus runs FOLDER` lists them"
        )
    skipped: dict[str, int] = {}

    def lines(name: str, most: int | None = None) -> list[dict[str, Any]]:
        found, bad = _lines(path / name, most)
        if bad:
            skipped[name] = bad
        return found

    metrics, experts = lines("metrics.jsonl"), lines("experts.jsonl", _EXPERT_STEPS)
    steps = [each for each in metrics if type(each.get("step")) is int]
    loads = [each for each in experts if type(each.get("step")) is int and _is_load(each.get("load"))]
    sampled = lines("samples.jsonl", _SAMPLE_STEPS)
    texts = [each for each in sampled if type(each.get("step")) is int and _are_samples(each.get("samples"))]
    files = (("metrics.jsonl", metrics, steps), ("experts.jsonl", experts, loads), ("samples.jsonl", sampled, texts))
    for name, found, good in files:
        if len(good) < len(found):
            skipped[name] = skipped.get(name, 0) + len(found) - len(good)
    timeline = _json(path / "timeline.json", skipped)
    if timeline is not None and not _is_timeline(timeline):
        timeline, skipped["timeline.json"] = None, 1
    newest = {each["step"]: each for each in steps}
    evaluations = {file.stem: read for file in sorted((path / FOLDER).glob("*.json")) if (read := _json(file, skipped))}
    for scores in evaluations.values():
        if (step := scored_step(scores)) in newest:
            newest[step] = newest[step] | as_metrics(scores)
    return RunFolder(
        path,
        [newest[step] for step in sorted(newest)],
        len(steps) - len(newest),
        loads,
        list({each["step"]: each for each in texts}.values()),
        lines("events.jsonl"),
        lines("environment.jsonl"),
        _config(path / "config.yaml", skipped),
        timeline,
        evaluations,
        skipped,
        ended,
    )


def is_run(path: Path) -> bool:
    """Returns True if a folder has metrics.jsonl, or both config.yaml and environment.jsonl."""
    return (path / "metrics.jsonl").is_file() or (
        (path / "config.yaml").is_file() and (path / "environment.jsonl").is_file()
    )


def _lines(path: Path, most: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Returns (the JSON mappings of a file with one per line, number of damaged lines).

    Parses at most `most` lines, evenly spaced and including the last line.
    """
    try:
        texts = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if most is not None and len(texts) > most:
        texts = [texts[(number + 1) * len(texts) // most - 1] for number in range(most)]
    found = [value for start in range(0, len(texts), _TOGETHER) for value in _values(texts[start : start + _TOGETHER])]
    return found, len(texts) - len(found)


def _values(texts: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parses the mappings among the lines, all lines together if possible."""
    try:
        values = _parsed(b"[" + b",".join(texts) + b"]")
    except ValueError:
        values = []
    if len(values) != len(texts):
        values = map(_parsed_or_none, texts)
    return [value for value in values if isinstance(value, dict)]


def _parsed_or_none(line: bytes) -> Any:
    try:
        return _parsed(line)
    except ValueError:
        return None


def _parsed(text: bytes) -> Any:
    """Parses JSON. Converts long integers to floats, and escapes lone surrogates."""
    value = parse_json(text, parse_int=lambda digits: int(digits) if len(digits) < _DIGITS else float(digits))
    return _with_printable_text(value) if b"\\ud" in text.lower() else value


def _with_printable_text(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {printable(key, _ALLOWED): _with_printable_text(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return list(map(_with_printable_text, tree))
    return printable(tree, _ALLOWED) if isinstance(tree, str) else tree


def _config(path: Path, skipped: dict[str, int]) -> dict[str, Any]:
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"), str(path))
        return with_new_names(raw) if isinstance(raw, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, UserError):
        skipped[path.name] = 1
        return {}


def _json(path: Path, skipped: dict[str, int]) -> dict[str, Any] | None:
    try:
        content = _parsed(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        skipped[path.name] = 1
        return None
    return content


def _is_load(load: Any) -> bool:
    """Returns True if the value maps layer numbers to lists of numbers that stay finite in per cent."""
    return isinstance(load, dict) and all(
        layer.isdecimal()
        and len(layer) < _DIGITS
        and isinstance(experts, list)
        and set(map(type, experts)) <= {float, int}
        and all(math.isfinite(100.0 * expert) for expert in experts)
        for layer, experts in load.items()
    )


def _are_samples(samples: Any) -> bool:
    return isinstance(samples, list) and all(
        isinstance(each, dict) and isinstance(each.get("prompt"), str) and isinstance(each.get("text"), str)
        for each in samples
    )


def _is_timeline(found: Mapping[str, Any]) -> bool:
    """Returns True if the ranks and the events (rank, kind, stage, microbatch, start, end) are valid."""
    ranks, timelines = found.get("ranks"), (found.get("events"), found.get("simulated", []))
    return (
        isinstance(ranks, int)
        and 1 <= ranks < _RANKS
        and all(
            isinstance(events, list)
            and all(
                isinstance(event, list)
                and len(event) == 6
                and event[0] in range(ranks)
                and isinstance(event[1], str)
                and all(is_number(number) and math.isfinite(number) for number in event[2:])
                for event in events
            )
            for events in timelines
        )
    )


def _is_held(lease: Path) -> bool:
    """Returns True if the lease shows that a process of the run is alive."""
    try:
        age, holder = time.time() - os.stat(lease).st_mtime, parse_json(lease.read_bytes())
        here, pid = holder["host"] == socket.gethostname(), holder["pid"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    if here and not holder.get("several"):
        return psutil.pid_exists(pid)
    return age < _BEAT or (age < _SILENCE and not here) or (here and psutil.pid_exists(pid))


def mapping(value: Any) -> Mapping[str, Any]:
    """Replaces a value that is not a mapping by an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def is_number(value: Any) -> TypeGuard[float]:
    """Returns True for a float, including NaN and infinity, and for an integer below 1e300 in magnitude."""
    return type(value) is float or (type(value) is int and abs(value) < 1e300)


def number(value: Any) -> float | None:
    """Replaces a value that is not a number by None."""
    return value if is_number(value) else None


def plain(value: float | None) -> float | str | None:
    """Converts a number for JSON: NaN and infinity become text."""
    return value if value is None or math.isfinite(value) else str(value)
