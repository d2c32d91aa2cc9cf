"""Retention, removal and renaming of a run's checkpoints."""

import shutil
from pathlib import Path

from optimus.checkpoint.folder import DESCRIPTION, MANIFEST, all_folders, frozen_folders, list_checkpoints, step_of
from optimus.checkpoint.rollback import marker_of, resume_points, rolled_back_to
from optimus.disk import parse_json


def remove(path: Path) -> None:
    """Deletes a checkpoint or a folder of frozen parameters, after a rename to a hidden name."""
    shutil.rmtree(hide(path))


def hide(path: Path) -> Path:
    """Renames a folder to a hidden name; `clear_leftovers` deletes folders with such names. Returns the new path."""
    return path.rename(path.with_name(f".{path.name}.old"))


def clear_leftovers(run: Path) -> None:
    """Deletes the folders of unfinished writes (`.*.partial`) and unfinished deletions (`.*.old`) in `checkpoints/`."""
    for pattern in (".*.partial", ".*.old"):
        for path in (run / "checkpoints").glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def retire(run: Path, keep: int, new: Path | None = None) -> None:
    """Deletes complete full checkpoints, oldest first, until `keep` remain.

    A `keep` of 2 gives dual checkpoints (the Optimus paper, section 4).

    `new`, a checkpoint that the caller will write, counts towards `keep`, but one complete checkpoint always remains.
    The target of a rollback counts too. Deletes the rollback marker if the target is beyond `keep`.
    """
    found = [point.path for point in resume_points(run) if point.path != new and (point.path / MANIFEST).is_file()]
    marked = rolled_back_to(run)
    for path in reversed(found[keep if new is None else max(keep - 1, 1) :]):
        if path == marked:
            marker_of(run).unlink()
        if path.name.startswith("step-"):
            remove(path)


def retire_weights(run: Path, every: int, new: Path) -> None:
    """Deletes complete weights-only checkpoints that `new` makes outdated, except the target of a rollback."""
    marked = rolled_back_to(run)
    for path in list_checkpoints(run, "weights"):
        if is_outdated(step_of(path), every, step_of(new)) and path != marked:
            remove(path)


def is_outdated(step: int, every: int, newest: int) -> bool:
    """Returns True if `step` is before `newest` and is no multiple of `every`."""
    return step < newest and step % every > 0


def frozen_folder_of(run: Path, name: str | None) -> tuple[str, bool]:
    """Returns (`name`, True) if the run has a complete folder `name` of frozen parameters, and otherwise (a new name,
    False)."""
    if name is not None and (run / "checkpoints" / name / MANIFEST).is_file():
        return name, True
    return f"frozen-{max(map(step_of, frozen_folders(run)), default=0) + 1}", False


def retire_frozen(run: Path, name: str | None) -> None:
    """Deletes folders of frozen parameters, except `name` and the folders that a checkpoint's description names."""
    others = {path.name: path for path in frozen_folders(run) if path.name != name}
    try:
        for file in (run / "checkpoints").rglob(DESCRIPTION) if others else ():
            others.pop(parse_json(file.read_text(encoding="utf-8")).get("frozen"), None)
    except (OSError, ValueError, AttributeError, TypeError):
        return  # a damaged description may refer to any folder
    for path in others.values():
        remove(path)


def set_aside(path: Path) -> Path:
    """Renames a checkpoint or a rollback marker to `NAME.aside` or `NAME.aside-K`. Returns the new path."""
    aside, number = path.with_name(f"{path.name}.aside"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.aside-{number}")
    return path.rename(aside)


def set_newer_aside(run: Path, step: int) -> list[Path]:
    """Sets aside the full checkpoints of steps after `step`, and a rollback marker that names a later step. Returns the
    new paths."""
    newer = [path for path in all_folders(run, "step") if step_of(path) > step]
    marked = rolled_back_to(run)
    if marked is not None and step_of(marked) > step:  # the resumed run will have other weights at that step
        newer.append(marker_of(run))
    return [set_aside(path) for path in newer]
