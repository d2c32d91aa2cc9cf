"""Which checkpoints of a run are kept, and what is taken out of the way."""

import shutil
from pathlib import Path

from optimus.checkpoint.folder import DESCRIPTION, MANIFEST, all_folders, frozen_folders, list_checkpoints, step_of
from optimus.checkpoint.rollback import marker_of, resume_points, rolled_back_to
from optimus.disk import parse_json


def remove(path: Path) -> None:
    """Delete a checkpoint; at once for all who look, as it loses its name first."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")))


def clear_leftovers(run: Path) -> None:
    """Delete what a killed run was writing or deleting."""
    for pattern in (".*.partial", ".*.old"):
        for path in (run / "checkpoints").glob(pattern):
            shutil.rmtree(path)


def retire(run: Path, keep: int, new: Path | None = None) -> None:
    """Delete the oldest full checkpoints beyond `keep` (dual checkpoints: the Optimus paper, section 4, with 2).

    With `new`, one of them is about to be written: its place is made free, but the newest that is there stays. The weights
    that a run has been rolled back to count as one of them: it goes on from there. Beyond `keep` it does no more.
    """
    found = [point.path for point in resume_points(run) if point.path != new and (point.path / MANIFEST).is_file()]
    marked = rolled_back_to(run)
    for path in reversed(found[keep if new is None else max(keep - 1, 1) :]):
        if path == marked:
            marker_of(run).unlink()
        if path.name.startswith("step-"):
            remove(path)


def retire_weights(run: Path, every: int, new: Path) -> None:
    """Delete checkpoints of weights older than `new`, but for those of steps that are multiples of `every`, and that which
    the run has been rolled back to."""
    marked = rolled_back_to(run)
    for path in list_checkpoints(run, "weights"):
        if step_of(path) < step_of(new) and step_of(path) % every and path != marked:
            remove(path)


def place_of_frozen(run: Path, name: str | None) -> tuple[str, bool]:
    """(The folder of a run's frozen parameters, whether it is complete): `name` if that is, else one to be written."""
    if name is not None and (run / "checkpoints" / name / MANIFEST).is_file():
        return name, True
    return f"frozen-{max(map(step_of, frozen_folders(run)), default=0) + 1}", False


def retire_frozen(run: Path, name: str | None) -> None:
    """Delete folders of frozen parameters other than `name` that no checkpoint refers to, whatever has become of it."""
    others = {path.name: path for path in frozen_folders(run) if path.name != name}
    try:
        for file in (run / "checkpoints").rglob(DESCRIPTION) if others else ():
            others.pop(parse_json(file.read_text(encoding="utf-8")).get("frozen"), None)
    except (OSError, ValueError, AttributeError, TypeError):
        return  # who knows what a damaged one refers to
    for path in others.values():
        remove(path)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is damaged or in the way: it is neither resumed nor counted any more, and not deleted."""
    place, number = path.with_name(f"{path.name}.aside"), 1
    while place.exists():
        number += 1
        place = path.with_name(f"{path.name}.aside-{number}")
    return path.rename(place)


def set_newer_aside(run: Path, step: int) -> list[Path]:
    """Set aside what claims to be a full checkpoint of a later step than the one that is resumed, and the marker of such a
    rollback; returns the new names."""
    newer = [path for path in all_folders(run, "step") if step_of(path) > step]
    marked = rolled_back_to(run)
    if marked is not None and step_of(marked) > step:  # the run will come to that step again, with other weights
        newer.append(marker_of(run))
    return [set_aside(path) for path in newer]
