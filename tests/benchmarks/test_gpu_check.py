"""`make gpu-check` to its end, with tiny sizes, on a machine that has no accelerator and no pydantic but in wheels."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from benchmarks import gpu_check
from helpers.sweep import part_of

SCRIPT = Path(gpu_check.__file__)
CARRIED = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection")
PARTS = ["trace", "curve", "layouts", "moe", "tiles", "trainer", "kernels", "tests"]

# Packages that are carried are not found where they are installed.
HIDING = f"""
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in {[name.replace("-", "_") for name in CARRIED]}:
            path = [p for p in sys.path if "site-packages" not in p]
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the installed packages that are carried, and one that is for another Python."""
    folder = tmp_path_factory.mktemp("wheels")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in CARRIED:
        found = distribution(name)
        with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{found.version}-{tag}-{tag}-any.whl", "w") as wheel:
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    wheel.write(str(file.locate()), str(file))
    with zipfile.ZipFile(folder / "other-1.0-cp27-cp27mu-any.whl", "w") as wheel:
        wheel.writestr("pydantic/__init__.py", "raise RuntimeError")
    return folder


def check(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(HIDING, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "out"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    done = check(tmp_path, "--rehearse")
    assert done.returncode == 1
    assert "lacks pydantic pydantic-core annotated-types typing-inspection: install, or put wheels in" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_every_part_ends_or_says_why_not(tmp_path: Path, wheels: Path) -> None:
    parts = ["machine", "step", *part_of(PARTS, len(PARTS) // 2)]
    done = check(
        tmp_path, "--rehearse", "--wheels", str(wheels), *(word for part in parts for word in ("--part", part))
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "other-1.0-cp27-cp27mu-any.whl is not for this Python" in done.stdout
    summary = (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")
    for part in parts:
        line = next(line for line in summary.splitlines() if line.startswith(part))
        assert "done after" in line or (part == "tiles" and line.endswith("skipped: no accelerator")), line
    assert "predicted_step_seconds" in summary
    last = done.stdout.rstrip().splitlines()
    assert last[-1].startswith("gpu-check: all parts done; ")
    assert "\n".join(last[-1 - len(summary.splitlines()) : -1]) == summary.rstrip()
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert {"out/summary.txt", "out/machine.yaml", "out/step.json", "out/step.txt"} <= set(archive.getnames())


def test_parts_are_those_of_the_page(tmp_path: Path) -> None:
    """In this order, whether there is an accelerator or not; each with its time limit."""
    for chip in (None, "cuda"):
        found = gpu_check.parts(chip, tmp_path, tmp_path, rehearse=chip is None)
        assert [part.name for part in found] == [
            "machine", "tests", "step", "trace", "curve", "layouts", "moe", "tiles", "trainer", "kernels"
        ]  # fmt: skip
        assert sum(part.seconds for part in found) == 600
        assert {"machine", "step", *PARTS} == {part.name for part in found}
