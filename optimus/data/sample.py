"""Copies the sources of Python's standard library, as text for a first model."""

import shutil
import sysconfig
from pathlib import Path
from typing import Any

from optimus.disk import user_path
from optimus.errors import UserError, naming_disk_errors

_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_HELD_OUT = 20  # one of this many files is for validation


def sample_text(output: str | Path) -> dict[str, Any]:
    """Copies sources of Python's standard library, without tests and IDLE, into `output`. Every twentieth file goes
    into `held-out`, the others into `train`. Raises `UserError` if `output` exists and is not an empty folder, or if a
    file cannot be written.

    Returns `output`, `files` and `held_out` (numbers of training and validation files), and `bytes` (of all files).

    Example:
        optimus.sample_text("hello/text")["files"]
    """
    output = user_path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} already exists: choose another folder, or remove it")
    library = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in sorted(library.rglob("*.py")) if not _EXCLUDED & set(path.relative_to(library).parts)]
    sources = [path for path in found if _is_text(path)]
    sizes = {"train": list[int](), "held-out": list[int]()}
    with naming_disk_errors(output, "Choose another folder"):
        for number, source in enumerate(sources):
            part = "held-out" if number % _HELD_OUT == _HELD_OUT - 1 else "train"
            target = output / part / source.relative_to(library)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            sizes[part].append(target.stat().st_size)
    return {
        "output": str(output),
        "files": len(sizes["train"]),
        "held_out": len(sizes["held-out"]),
        "bytes": sum(map(sum, sizes.values())),
    }


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
