"""Builds wheels from copies of sources, and installs them into a folder."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def build_wheel(root: Path, names: Sequence[str], folder: Path) -> Path:
    """Builds the wheel of the project in `root`, of which the build needs the files and folders `names`."""
    for name in names:
        source, copy = root / name, folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(folder)], cwd=folder / "source", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def install(folder: Path, *wheels: Path) -> None:
    """Installs wheels into `folder` without their dependencies."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    done = subprocess.run([*pip, "--target", str(folder), *map(str, wheels)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
