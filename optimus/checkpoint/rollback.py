"""The checkpoints that a run can resume from, and rollbacks to earlier weights.

A rolled-back run restarts from the weights of a checkpoint, with fresh moments (the Optimus paper, section 4:
persistent model checkpoints).
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from optimus.checkpoint.folder import all_folders, list_checkpoints, step_folder, step_of, weights_folder
from optimus.checkpoint.lease import check_free
from optimus.checkpoint.reader import verify
from optimus.disk import parse_json, plain_name, read_json_lines, user_path, write_json
from optimus.errors import UserError, naming_disk_errors

_FILE = "rollback.json"


class ResumePoint(NamedTuple):
    """A checkpoint to resume from, either with all its state or with its weights only."""

    path: Path
    full: bool


def resume_points(run: Path) -> list[ResumePoint]:
    """Returns the checkpoints that `run` could resume from, newest first, without checking for damage."""
    marked = rolled_back_to(run)
    points = [ResumePoint(path, full=True) for path in all_folders(run, "step") if path != marked]
    points += [] if marked is None else [ResumePoint(marked, full=False)]
    return sorted(points, key=lambda point: (step_of(point.path), not point.full), reverse=True)


def marker_of(run: Path) -> Path:
    """Returns the path of the rollback marker, which names the checkpoint that `run` was rolled back to."""
    return run / "checkpoints" / _FILE


def rolled_back_to(run: Path) -> Path | None:
    """Returns the checkpoint that `run` was rolled back to, or None. Raises `UserError` if the marker is damaged."""
    marker = marker_of(run)
    if not marker.exists():
        return None
    try:
        path = marker.parent / plain_name(parse_json(marker.read_text(encoding="utf-8"))["checkpoint"])
        step_of(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{marker} cannot be read ({error}): run `optimus rollback` again, or delete it") from error
    return path


def rollback(run: str | Path, step: int, *, held: bool = False) -> dict[str, Any]:
    """Sets up `run` so that `--resume` restarts the run from the weights of `step`, with fresh moments.

    Raises `LeaseError` if a live run has the lease of the folder, unless the caller has the lease (`held`).

    Returns `checkpoint`, `step`, `moved` (the names of newer checkpoints) and `to`. The function moves the newer
    checkpoints to the new folder `to`, with a copy of any metrics; `to` is None if no checkpoint and no metrics are
    newer. Raises `UserError` if there is no checkpoint of `step`, if the checkpoint is damaged, or if the disk fails;
    the checkpoints then stay where they are.

    Example:
        api.rollback("runs/first", 6)["moved"]
    """
    run = user_path(run)
    if not held:
        check_free(run)
    path = next((path for path in (weights_folder(run, step), step_folder(run, step)) if path.is_dir()), None)
    if path is None:
        steps = sorted({step_of(path) for path in list_checkpoints(run, "step", "weights")})
        there = (
            f"its checkpoints are of steps {', '.join(map(str, steps))}" if steps else "it has no checkpoints at all"
        )
        raise UserError(f"{run} has no checkpoint of step {step}: {there}")
    if problems := verify(path):
        raise UserError(problems[0])
    newer = sorted(path for path in all_folders(run) if step_of(path) > step)
    with naming_disk_errors(run, "Mend the folder's permissions and run `optimus rollback` again"):
        aside = _put_aside(run, newer) if newer or _has_metrics_after(run, step) else None
        try:
            write_json(marker_of(run), {"checkpoint": path.name, "step": step})
        except OSError:
            _put_back(newer, aside)
            raise
    return {
        "checkpoint": str(path),
        "step": step,
        "moved": [each.name for each in newer],
        "to": None if aside is None else str(aside),
    }


def _has_metrics_after(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    steps = [record.get("step") for record in read_json_lines(path)] if path.exists() else []
    return any(isinstance(each, int) and each > step for each in steps)


def _put_aside(run: Path, newer: Sequence[Path]) -> Path:
    """Moves the checkpoints `newer` to a new folder, with a copy of any metrics, and returns the folder. Moves none if
    the disk fails."""
    folders = (run / "checkpoints" / f"abandoned-{number}" for number in count(1))
    aside = next(aside for aside in folders if not aside.exists())
    aside.mkdir()
    try:
        if (run / "metrics.jsonl").exists():
            shutil.copyfile(run / "metrics.jsonl", aside / "metrics.jsonl")
        for each in newer:
            each.rename(aside / each.name)
    except OSError:
        _put_back(newer, aside)
        raise
    return aside


def _put_back(newer: Sequence[Path], aside: Path | None) -> None:
    """Moves the checkpoints of `_put_aside` back, as far as the disk allows."""
    with suppress(OSError):
        for each in newer:
            if aside is not None and (aside / each.name).exists():
                (aside / each.name).rename(each)
        if aside is not None:
            shutil.rmtree(aside)
