"""Scores of a run's checkpoints, which `optimus evaluate --watch` writes into the run's folder `evaluations/`.

The training passes new scores to its metric sinks. After the training, `optimus evaluate --watch` passes later scores
to the sinks. The report shows scores at the step of their checkpoint.
"""

import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from optimus.disk import parse_json

FOLDER = "evaluations"
_DELIVERED = "delivered.txt"  # checksums and names of the files whose scores the sinks have
_STEPS = 10**15  # steps are below this number


def scores_path(run: Path, name: str, step: int) -> Path:
    """Returns the file for the scores of the checkpoint of `step`, in the series `name`."""
    return run / FOLDER / f"{name}-{step:08d}.json"


def as_metrics(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the finite scores in a file of `optimus evaluate` as metrics: `evaluated/bits_per_byte` and
    `evaluated/TASK/METRIC`."""
    tasks, numbers = found.get("tasks"), {"bits_per_byte": found.get("bits_per_byte")}
    for task, scores in tasks.items() if isinstance(tasks, Mapping) else ():
        if isinstance(scores, Mapping):
            numbers |= {f"{task}/{metric}": value for metric, value in scores.items() if metric != "n"}
    return {f"evaluated/{name}": float(value) for name, value in numbers.items() if _is_finite(value)}


def scored_step(found: object) -> int | None:
    """Returns the checkpoint's step in the content of a file of `optimus evaluate`; None for other content."""
    checkpoint = found.get("checkpoint") if isinstance(found, Mapping) else None
    step = checkpoint.get("step") if isinstance(checkpoint, Mapping) else None
    return step if type(step) is int and 0 <= step < _STEPS else None


def _is_finite(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


class NewScores:
    """The scores of a run that its metric sinks do not have yet."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._delivered: set[str] = set()
        self._seen: dict[str, int] = {}  # last change of each file, so that a call reads only new or changed files
        with suppress(OSError):
            self._delivered = {*(self._folder / _DELIVERED).read_text(encoding="utf-8").split()}

    def read(self) -> list[dict[str, Any]]:
        """Returns the scores that are new since the last call in this or an earlier process: `step` and metrics of each
        checkpoint. Skips files without scores."""
        records = []
        for path in sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError):
                changed = path.stat().st_mtime_ns
                if self._seen.get(path.name) == changed:
                    continue
                content = path.read_bytes()
                self._seen[path.name] = changed
                key = f"{zlib.crc32(content):08x}-{path.name}"
                if key in self._delivered or " " in key:
                    continue
                self._delivered.add(key)
                with (self._folder / _DELIVERED).open("a", encoding="utf-8") as file:
                    file.write(f"{key}\n")
                found = parse_json(content)
                if (step := scored_step(found)) is not None and (metrics := as_metrics(found)):
                    records.append({"step": step, **metrics})
        return records
