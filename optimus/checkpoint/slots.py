"""Which checkpoints of a run are kept, and what is taken out of the way."""

import shutil
from pathlib import Path

from optimus.checkpoint.folder import all_folders, list_checkpoints, step_of


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

    With `new`, one of them is about to be written: its place is made free, but the newest that is there stays.
    """
    found = [path for path in list_checkpoints(run) if path != new]
    room = keep if new is None else max(keep - 1, 1)
    for path in found[: max(0, len(found) - room)]:
        remove(path)


def retire_weights(run: Path, every: int) -> None:
    """Delete checkpoints of weights, but for those of steps that are multiples of `every`, and the newest."""
    for path in list_checkpoints(run, "weights")[:-1]:
        if step_of(path) % every:
            remove(path)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is damaged or in the way: it is neither resumed nor counted any more, and not deleted."""
    place, number = path.with_name(f"{path.name}.aside"), 1
    while place.exists():
        number += 1
        place = path.with_name(f"{path.name}.aside-{number}")
    return path.rename(place)


def set_newer_aside(run: Path, step: int) -> list[Path]:
    """Set aside what claims to be a full checkpoint of a later step than the one that is resumed; returns the new names."""
    return [set_aside(path) for path in all_folders(run, "step") if step_of(path) > step]
