"""`make gpu-check` runs to its end with tiny sizes on the CPU and on the fake accelerator. Its environment is that of a
GPU machine: pydantic is available as a wheel only."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu_check
from helpers.fake_device import NAME
from helpers.sweep import in_turns, part_of

SCRIPT = Path(gpu_check.__file__)
HERE = ("torch", "triton", "transformers", "numpy")  # packages of a GPU machine; their requirements are there, too
# Packages that a GPU machine lacks, though some packages in HERE require them.
LACKED = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection")
CARRIED = (*LACKED, "accelerate", "cloudpickle", "hypothesis", "psutil", "pytest")
PARTS = ["trace", "curve", "options", "layouts", "moe", "tiles", "trainer", "kernels", "tests"]


def needed(names: Iterable[str]) -> set[str]:
    """Returns the named distributions and all their transitive requirements."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            requirements = map(Requirement, distribution(name).requires or ())
            left += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with only the packages of a GPU machine."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed(HERE) - {*LACKED}:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels of the carried packages, and one wheel for another Python version."""
    folder = tmp_path_factory.mktemp("wheels")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in needed(CARRIED) - (needed(HERE) - {*LACKED}):
        found = distribution(name)
        with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{found.version}-{tag}-{tag}-any.whl", "w") as wheel:
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    wheel.write(str(file.locate()), str(file))
    with zipfile.ZipFile(folder / "other-1.0-cp27-cp27mu-any.whl", "w") as wheel:
        wheel.writestr("pydantic/__init__.py", "raise RuntimeError")
    return folder


def check(python: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(SCRIPT), "--output", str(tmp_path / "out"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_what_is_missing_is_named(python: Path, tmp_path: Path) -> None:
    done = check(python, tmp_path, "--rehearse")
    assert done.returncode == 1
    assert f"lacks {' '.join(LACKED)} psutil cloudpickle: install, or put wheels in" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("device", in_turns(["cpu", "fake"], 2))
def test_every_part_ends_or_says_why_not(device: str, python: Path, tmp_path: Path, wheels: Path) -> None:
    parts = ["machine", "step", *part_of(PARTS, len(PARTS) // 2)]
    named = (word for part in parts for word in ("--part", part))
    done = check(python, tmp_path, "--rehearse", device, "--wheels", str(wheels), *named)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "other-1.0-cp27-cp27mu-any.whl is not for this Python" in done.stdout
    summary = (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")
    for part in parts:
        line = next(line for line in summary.splitlines() if line.startswith(part))
        skipped = device == "cpu" and part == "tiles" and line.endswith("skipped: no accelerator")
        assert skipped or "done after" in line, line
    assert "predicted_step_seconds" in summary
    last = done.stdout.rstrip().splitlines()
    assert last[-1].startswith("gpu-check: all parts done; ")
    assert "\n".join(last[-1 - len(summary.splitlines()) : -1]) == summary.rstrip()
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert {"out/summary.txt", "out/machine.yaml", "out/step.json", "out/step.txt"} <= set(archive.getnames())


def test_parts_are_those_of_the_page(tmp_path: Path) -> None:
    """The parts are in the order of the documentation, with and without an accelerator; their time limits add up to 600
    s."""
    assert gpu_check.FAKE == NAME
    for chip in (None, "cuda", NAME):
        found = gpu_check.parts(chip, tmp_path, tmp_path, rehearse=chip != "cuda")
        assert [part.name for part in found] == [
            "machine", "tests", "step", "trace", "curve", "options", "layouts", "moe", "tiles", "trainer", "kernels"
        ]  # fmt: skip
        assert sum(part.seconds for part in found) == 600
        assert {"machine", "step", *PARTS} == {part.name for part in found}
