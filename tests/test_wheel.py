"""The installed package: every file is in the wheel, and every command runs from it, outside the checkout."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from helpers.wheels import build_sdist, build_wheel, install

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["optimus", "pyproject.toml", "README.pypi.md", "LICENSE"]

# Runs in the installed package: all commands in turn, in one process, which loads torch once. Prints each result.
DRIVER = """
import contextlib, io, json, sys
import optimus
from optimus import cli

found = {"file": optimus.__file__, "version": optimus.__version__, "commands": []}
for words in json.load(sys.stdin):
    sys.argv, out, err, code = ["optimus", *words], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    found["commands"].append([words, code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, SOURCES, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    install(folder, wheel)
    return folder


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    """The wheel has every file, including tables, machines and scripts that no import would miss."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "optimus").rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} == {name for name in packed if "dist-info" not in name}


def test_the_source_distribution_has_what_a_packager_needs(tmp_path: Path) -> None:
    """It has every file of the checkout but what git ignores, so that the tests run from it, and builds the same wheel."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()}
    names = [path.name for path in ROOT.iterdir() if path.name not in ignored | {".git"} and path.suffix != ".egg-info"]
    names = [name for name in names if name not in {".hypothesis", "PKG-INFO", "setup.cfg"}]
    built = build_sdist(ROOT, names, tmp_path)
    with tarfile.open(built) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    there, source = ({path.relative_to(at).as_posix() for path in at.rglob("*") if path.is_file()}
                     for at in (unpacked, tmp_path / "source"))  # fmt: skip
    assert {".ci/run", "CHANGELOG.md", "LICENSE", "SECURITY.md", "tests/test_wheel.py"} <= there
    assert not [name for name in source - there if ".egg-info/" not in name]
    wheels = [build_wheel(root, SOURCES, tmp_path / name) for name, root in (("a", ROOT), ("b", unpacked))]
    first, second = (sorted((each.filename, each.CRC) for each in zipfile.ZipFile(wheel).infolist())
                     for wheel in wheels)  # fmt: skip
    assert first == second


def test_the_index_shows_a_text_without_links_into_the_checkout(wheel: Path) -> None:
    packed = zipfile.ZipFile(wheel)
    (name,) = [each for each in packed.namelist() if each.endswith(".dist-info/METADATA")]
    text = packed.read(name).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert "pip install optimus-pretrain" in text
    assert not re.findall(r"\]\((?!https:)|(?:href|src|srcset)=", text)
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"```sh\n(.*?)```", text, re.S) if "optimus train" in each]
    assert [line.partition(" #")[0].rstrip() for line in block.splitlines()] == [
        line.partition(" #")[0].rstrip()
        for each in re.findall(r"```sh\n(.*?)```", shown, re.S) if "optimus sample-text" in each
        for line in each.splitlines() if not line.startswith("make ")
    ]  # fmt: skip


USER = """
from typing import Any

import optimus
from optimus import api


class Stop(optimus.Hook):
    order = optimus.Order.JUDGE

    def after_step(self, trainer: optimus.Trainer, record: optimus.StepRecord) -> None:
        if record.step == 3:
            trainer.stop("three steps are enough")


def run(path: str) -> dict[str, Any]:
    try:
        api.config(path)
        return optimus.train(path, ranks=2, hooks=[Stop])
    except optimus.UserError as error:
        raise SystemExit(error.code) from error


plans = api.plan("mula-1b", machine="dgx-h100", ranks=8).plans
fastest: float = plans[0].tokens_per_second
"""


@pytest.mark.slow
@pytest.mark.in_turn(1, 3)
def test_strict_type_checkers_read_the_types_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """mypy in strict mode accepts a program that uses the library well, and rejects one that does not."""
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    install(packages, wheel)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # what Optimus depends on
    (tmp_path / "good.py").write_text(USER)
    (tmp_path / "bad.py").write_text(
        "import optimus\noptimus.train(3)\nfrom optimus import lazy_exports\noptimus.models().nothing\n"
    )
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", str(python), "good.py", "bad.py"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "MYPYPATH": ""},
    )  # fmt: skip
    assert done.stderr == ""
    errors = re.findall(r"^(\w+\.py):(\d+): error:.*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert errors == [("bad.py", "2", "arg-type"), ("bad.py", "3", "attr-defined"), ("bad.py", "4", "attr-defined")], (
        done.stdout
    )


@pytest.mark.in_turn(2, 3)
def test_every_command_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    text = "\n".join(f"line {number} of a text to train on" for number in range(2000))
    (tmp_path / "text.md").write_text(text)
    config = {
        "model": "mula-tiny-moe",
        "data": {"path": "data"},
        "train": {"output": "run", "steps": 4, "global_batch": 4, "micro_batch": 2, "sequence_length": 16}
        | {"precision": "float32"},
        "lr_schedule": {"warmup_steps": 2},
        "checkpoint": {"every": 2, "weights_every": 2},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    small = ["model.hidden=16", "model.layers=2", "model.intermediate=8", "model.heads=2", "model.vocab=320"]
    machines = [path.stem for path in (ROOT / "optimus" / "plan" / "machines").glob("*.yaml")]
    words = [
        "models", "--help", "bench --help", "lab --help", "rendezvous --help", "launch --help", "bench machine --help",
        "bench train",
        "prepare text.md --output data --train-tokenizer 300 --context 16 --workers 1",
        f"train run.yaml {' '.join(small)} --check",
        f"train run.yaml {' '.join(small)}",
        "evaluate run --text text.md --output scores.json",
        "generate run --prompt line --max-tokens 4",
        "export run --output hf",
        "import hf --output imported",
        "checkpoint list run", "checkpoint verify run", "checkpoint show run",
        "rollback run --step 2",
        "schedule zbv --stages 2 --microbatches 4",
        "plan mula-1b --machine dgx-h100 --ranks 8 --best 1",
        *[f"plan mula-tiny --as-is --machine {name} --ranks 1" for name in machines],
        f"launch run.yaml train.output=other {' '.join(small)} --check",
        f"launch run.yaml train.output=other {' '.join(small)} --scheduler slurm --output job.sh",
        f"launch run.yaml train.output=other {' '.join(small)} --scheduler pbs --output job.pbs",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([line.split() for line in words]),
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(installed)
    failed = {" ".join(command): err for command, code, _, err in found["commands"] if code}
    assert "optimus bench train: an installed package has no benchmarks" in failed.pop("bench train")
    assert not failed
    script = subprocess.run(
        [sys.executable, installed / "bin" / "optimus", "models"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert script.stdout == next(out for command, _, out, _ in found["commands"] if command == ["models"])
