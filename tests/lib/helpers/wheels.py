"""Builds wheels and source distributions from copies of sources, and installs them into a folder."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build_wheel(root: Path, names: Sequence[str], folder: Path) -> Path:
    """Builds the wheel of the project in `root`, of which the build needs the files and folders `names`."""
    _build("build_wheel", root, names, folder)
    return next(folder.glob("*.whl"))


def build_sdist(root: Path, names: Sequence[str], folder: Path) -> Path:
    """Builds the source distribution of the project in `root` from its files and folders `names`."""
    _build("build_sdist", root, names, folder)
    return next(folder.glob("*.tar.gz"))


def _build(what: str, root: Path, names: Sequence[str], folder: Path) -> None:
    for name in names:
        source, copy = root / name, folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, what, str(folder)], cwd=folder / "source", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def install(folder: Path, *wheels: Path) -> None:
    """Installs wheels into `folder` without their dependencies."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    done = subprocess.run([*pip, "--target", str(folder), *map(str, wheels)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
