"""The container files install what the package has, from files that exist, with one list of steps."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKER = (ROOT / "containers" / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (ROOT / "containers" / "optimus.def").read_text(encoding="utf-8")


def test_extras_and_versions_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python has it from 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = [each for each in project["dependencies"] if each.startswith("torch")]
    for text in (DOCKER, APPTAINER):
        (extras,) = re.findall(r"(?i)extras=([\w,]+)", text)
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
        assert f'"{torch}"' in text
        assert re.search(r"(?i)torch_index=https://pypi\.org/simple", text)
    pages = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    users = set(project["optional-dependencies"]) - {"bench", "dev"}
    assert users <= set(re.findall(r"`([a-z0-9]+)`", pages)), "name each extra on the page"


def test_files_that_are_copied_exist() -> None:
    copied = [source for line in re.findall(r"^COPY (.+)$", DOCKER, re.M) for source in line.split()[:-1]]
    files = re.search(r"%files\n(.*?)\n\n", APPTAINER, re.S)
    assert files is not None
    there = [line.split()[0] for line in files[1].splitlines()]
    assert sorted(copied) == sorted(there)
    assert all((ROOT / each).exists() for each in copied)


def test_both_run_the_same_steps() -> None:
    steps = re.findall(r"(pip install [^\n&]+|apt-get install [^\n\\]+)", DOCKER)
    post = APPTAINER.partition("%post")[2].partition("%environment")[0]
    theirs = re.findall(r"(pip install .+|apt-get install .+)", post)
    named = {"$TORCH_INDEX": "{{ torch_index }}", "$EXTRAS": "{{ extras }}"}
    assert len(steps) == 3
    for ours, other in zip(steps, theirs, strict=True):
        for variable, value in named.items():
            ours = ours.replace(variable, value)
        assert ours.strip() == other.strip()


@pytest.mark.parametrize("name", ["post", "runscript"])
def test_the_shell_has_nothing_against_the_scripts(name: str) -> None:
    script = re.search(rf"%{name}\n(.*?)(?:\n%|\Z)", APPTAINER, re.S)
    assert script is not None
    done = subprocess.run(["bash", "-n"], input=script[1], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_builds(tmp_path: Path) -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("needs a Docker daemon")
    done = subprocess.run(
        ["docker", "build", "--check", "-f", "containers/Dockerfile", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
