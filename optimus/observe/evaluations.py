"""The scores that `optimus evaluate --watch` writes into the folder `evaluations/` of a run."""

import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from optimus.disk import parse_json

FOLDER = "evaluations"
_DELIVERED = "delivered.txt"  # checksums and names of the files whose scores the metric sinks have
_STEPS = 10**15  # steps are below this number


def scores_path(run: Path, name: str, step: int) -> Path:
    """Returns the file for the scores of the checkpoint of `step`, in the series `name`."""
    return run / FOLDER / f"{name}-{step:08d}.json"


def as_metrics(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the finite scores in `found` as metrics.

    `found` is the content of a file that `optimus evaluate` writes. The metrics are `evaluated/bits_per_byte` and
    `evaluated/TASK/METRIC`. Leaves out `n`, the number of documents of a task.
    """
    tasks, numbers = found.get("tasks"), {"bits_per_byte": found.get("bits_per_byte")}
    for task, scores in tasks.items() if isinstance(tasks, Mapping) else ():
        if isinstance(scores, Mapping):
            numbers |= {f"{task}/{metric}": value for metric, value in scores.items() if metric != "n"}
    return {f"evaluated/{name}": float(value) for name, value in numbers.items() if _is_finite(value)}


def scored_step(found: object) -> int | None:
    """Returns the step of the scored checkpoint; None if `found`, the content of a file, has no valid step."""
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
        self._read: list[str] = []  # keys of the read files that `delivered.txt` does not list
        self._seen: dict[str, int] = {}  # time of the last change of each read file, in ns
        with suppress(OSError):
            self._delivered = {*(self._folder / _DELIVERED).read_bytes().decode(errors="replace").split("\n")}

    def read(self) -> list[dict[str, Any]]:
        """Returns new scores, as records of `step` and metrics. Leaves out files whose names are not printable."""
        records = []
        for path in sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError):
                changed = path.stat().st_mtime_ns
                if self._seen.get(path.name) == changed:
                    continue
                content = path.read_bytes()
                self._seen[path.name] = changed
                key = f"{zlib.crc32(content):08x}-{path.name}"
                if key in self._delivered or not key.isprintable():
                    continue
                self._delivered.add(key)
                self._read.append(key)
                found = parse_json(content)
                if (step := scored_step(found)) is not None and (metrics := as_metrics(found)):
                    records.append({"step": step, **metrics})
        return records

    def note(self) -> None:
        """Lists in `delivered.txt` the files that `read` has read. The metric sinks must have the scores before.

        After a disk error, the next call lists these files too.
        """
        if self._read:
            with suppress(OSError):
                with (self._folder / _DELIVERED).open("a", encoding="utf-8") as file:
                    file.write("".join(f"{key}\n" for key in self._read))
                self._read = []
