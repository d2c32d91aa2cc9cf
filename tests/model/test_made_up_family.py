"""One file adds a family: with `made_up.py` among the families, its models train, shard, export and are planned."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import optimus
from optimus.observe.metrics import read_metrics

FILE = Path(__file__).with_name("made_up.py")
MODEL = {
    "family": "made_up", "hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 24, "vocab": 320, "window": 7,
    "experts": 4, "experts_per_token": 2, "shared_experts": 1, "dense_layers": 1, "attention_bias": "all", "logit_cap": 5.0,
}  # fmt: skip
TWO = {
    "tensor": {"tensor": 2, "expert_tensor": 2, "sequence": True},
    "experts": {"data": 2, "expert": 2},
    "pipeline": {"pipeline": 2},
}
COMMANDS = """
import json, sys
from helpers.launched import launched
from optimus.launch import here
from typer.testing import CliRunner
from optimus.cli import app
here.start_ranks = launched
for line in sys.stdin:
    result = CliRunner().invoke(app, [*json.loads(line), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    print(json.dumps(json.loads(result.stdout)))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package with the added file."""
    copy = tmp_path / "package" / "optimus"
    shutil.copytree(Path(optimus.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FILE, copy / "model" / "families")
    return copy.parent


def run(package: Path, commands: list[list[str]]) -> list[Any]:
    """Runs commands with that package and returns their JSON output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *sys.path])}
    given = "\n".join(map(json.dumps, commands))
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], input=given, capture_output=True, text=True, env=environment, cwd=package
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_file_is_short() -> None:
    assert len(FILE.read_text().splitlines()) < 60


@pytest.mark.in_turn(2, 3)
def test_a_family_is_a_file(package: Path, small_run: dict[str, Any], tmp_path: Path) -> None:
    one = small_run | {"model": MODEL, "train": small_run["train"] | {"precision": "float32", "steps": 3}}
    trained = []
    for name, parallel in {"one": {}, **TWO}.items():
        file, output = tmp_path / f"{name}.yaml", str(tmp_path / name)
        changed = {"train": one["train"] | {"output": output}, "parallel": parallel}
        file.write_text(yaml.safe_dump(one | changed))
        trained.append(["train", str(file), *(["--ranks", "2"] if parallel else [])])
    plan = ["plan", str(tmp_path / "one.yaml"), "--ranks", "8", "--machine", "laptop"]
    exported, imported, again = (str(tmp_path / name) for name in ("exported", "imported", "again"))
    folders = [
        ["export", str(tmp_path / "one"), "--output", exported],
        ["import", exported, "--output", imported],
        ["export", imported, "--output", again],
    ]
    families, planned, *_ = run(package, [["models", "--families"], plan, *trained, *folders])

    assert {"name": "made_up", "class": "MadeUpForCausalLM", "presets": []} in families
    assert planned
    losses = {name: [row["loss"] for row in read_metrics(tmp_path / name)] for name in ("one", *TWO)}
    assert len(losses["one"]) == 3
    for name in TWO:
        assert losses[name] == pytest.approx(losses["one"], rel=1e-5), name
    for file in ("config.json", "model.safetensors"):
        assert Path(exported, file).read_bytes() == Path(again, file).read_bytes()
