"""Scores of checkpoints that `optimus evaluate --watch` measures beside a training, in the folder `evaluations/` of the run.

The training passes new scores to its metric sinks, and the report shows them at the step of their checkpoint.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimus.disk import parse_json

FOLDER = "evaluations"
_DELIVERED = "delivered.txt"  # names of the files whose scores the sinks have


def scores_path(run: Path, name: str, step: int) -> Path:
    """Returns the file for the scores of the checkpoint of `step`, in the series `name`."""
    return run / FOLDER / f"{name}-{step:08d}.json"


def as_metrics(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scores in a file of `optimus evaluate` as metrics: `evaluated/bits_per_byte` and
    `evaluated/TASK/METRIC`."""
    tasks, numbers = found.get("tasks"), {"bits_per_byte": found.get("bits_per_byte")}
    for task, scores in tasks.items() if isinstance(tasks, Mapping) else ():
        if isinstance(scores, Mapping):
            numbers |= {f"{task}/{metric}": value for metric, value in scores.items() if metric != "n"}
    return {
        f"evaluated/{name}": float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class NewScores:
    """The scores of a run that its metric sinks do not have yet."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._delivered: set[str] = set()
        with suppress(OSError):
            self._delivered = {*(self._folder / _DELIVERED).read_text(encoding="utf-8").split()}

    def read(self) -> list[dict[str, Any]]:
        """Reads the scores that are new since the last call, also of an earlier process: `step` and metrics of each
        checkpoint. Skips files that `evaluate` has not written."""
        records = []
        for path in sorted(self._folder.glob("*.json")):
            if path.name in self._delivered or " " in path.name:
                continue
            self._delivered.add(path.name)
            with suppress(OSError, ValueError):
                found = parse_json(path.read_text(encoding="utf-8"))
                step = found["checkpoint"]["step"] if isinstance(found, Mapping) else None
                if type(step) is int and (metrics := as_metrics(found)):
                    records.append({"step": step, **metrics})
            with suppress(OSError), (self._folder / _DELIVERED).open("a", encoding="utf-8") as file:
                file.write(f"{path.name}\n")
        return records
