"""`--resume auto` starts a run or continues it, with the same command."""

import json
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

import optimus
from optimus.cli import app


def test_the_same_command_begins_and_goes_on(small_run: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_run))
    words = ["train", str(config), "--resume", "auto", "--json", "--set"]
    steps = []
    for stop in (2, 4):
        result = CliRunner().invoke(app, [*words, f"train.stop_at={stop}"], catch_exceptions=False)
        steps.append(json.loads(result.stdout)["step"])
    assert steps == [2, 4]
    assert optimus.train(small_run, resume="auto")["step"] == 6
