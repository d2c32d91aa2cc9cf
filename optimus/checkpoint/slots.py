"""Retention of a run's checkpoints, and removal and renaming of checkpoints."""

import shutil
from pathlib import Path

from optimus.checkpoint.folder import DESCRIPTION, MANIFEST, all_folders, frozen_folders, list_checkpoints, step_of
from optimus.checkpoint.rollback import marker_of, resume_points, rolled_back_to
from optimus.disk import parse_json


def remove(path: Path) -> None:
    """Deletes a checkpoint, after a rename to a hidden name."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")))


def clear_leftovers(run: Path) -> None:
    """Deletes the folders of unfinished writes (`.*.partial`) and unfinished deletions (`.*.old`) in `checkpoints/`."""
    for pattern in (".*.partial", ".*.old"):
        for path in (run / "checkpoints").glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def retire(run: Path, keep: int, new: Path | None = None) -> None:
    """Deletes the oldest complete full checkpoints beyond `keep`. A `keep` of 2 gives dual checkpoints (the Optimus
    paper, section 4).

    `new`, a checkpoint that the caller will write, counts towards `keep`, but the newest complete checkpoint always
    stays. The target of a rollback counts too. If the target is beyond `keep`, the function deletes the rollback
    marker.
    """
    found = [point.path for point in resume_points(run) if point.path != new and (point.path / MANIFEST).is_file()]
    marked = rolled_back_to(run)
    for path in reversed(found[keep if new is None else max(keep - 1, 1) :]):
        if path == marked:
            marker_of(run).unlink()
        if path.name.startswith("step-"):
            remove(path)


def retire_weights(run: Path, every: int, new: Path) -> None:
    """Deletes complete weights-only checkpoints of steps before the step of `new`, except multiples of `every` and the
    target of a rollback."""
    marked = rolled_back_to(run)
    for path in list_checkpoints(run, "weights"):
        if step_of(path) < step_of(new) and step_of(path) % every and path != marked:
            remove(path)


def frozen_folder_of(run: Path, name: str | None) -> tuple[str, bool]:
    """Returns `name` and True if the run has a complete folder `name` of frozen parameters. Otherwise returns a new
    name and False."""
    if name is not None and (run / "checkpoints" / name / MANIFEST).is_file():
        return name, True
    return f"frozen-{max(map(step_of, frozen_folders(run)), default=0) + 1}", False


def retire_frozen(run: Path, name: str | None) -> None:
    """Deletes folders of frozen parameters, except `name` and the folders that a checkpoint's description below
    `checkpoints/` names."""
    others = {path.name: path for path in frozen_folders(run) if path.name != name}
    try:
        for file in (run / "checkpoints").rglob(DESCRIPTION) if others else ():
            others.pop(parse_json(file.read_text(encoding="utf-8")).get("frozen"), None)
    except (OSError, ValueError, AttributeError, TypeError):
        return  # a damaged description may refer to any folder
    for path in others.values():
        remove(path)


def set_aside(path: Path) -> Path:
    """Renames a checkpoint or a rollback marker to `NAME.aside` or `NAME.aside-K`, which runs ignore. Returns the new
    path."""
    aside, number = path.with_name(f"{path.name}.aside"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.aside-{number}")
    return path.rename(aside)


def set_newer_aside(run: Path, step: int) -> list[Path]:
    """Sets aside the full checkpoints of steps after `step`, and a rollback marker that names a later step.

    Returns the new paths.
    """
    newer = [path for path in all_folders(run, "step") if step_of(path) > step]
    marked = rolled_back_to(run)
    if marked is not None and step_of(marked) > step:  # the resumed run will have other weights at that step
        newer.append(marker_of(run))
    return [set_aside(path) for path in newer]
