"""Writing so that what is there is complete: atomic replacement, names and bytes on the disk before going on; and plots."""

import json
import os
from pathlib import Path
from typing import Any

from optimus.errors import UserError, how_to_install


def write_json(path: Path, content: Any) -> None:
    """Replace the file at once, and return when it is on the disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on the disk, so that a rename outlasts a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_plot(path: Path) -> None:
    """Raises `UserError` where no plot can be made: to be asked before minutes of work."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"--plot needs matplotlib: {how_to_install('bench')}, or leave --plot out") from error
    if path.suffix != ".png":
        raise UserError(f"--plot {path}: give the name of a .png file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.absolute().parent}; make it first")
