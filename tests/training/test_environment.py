"""Every start and resume of a run records its environment, without secrets."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from optimus.training.environment import git_commit


def records(run: dict[str, Any]) -> list[dict[str, Any]]:
    text = (Path(run["train"]["output"]) / "environment.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_start_leaves_a_record(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-the-environment")
    optimus.train(small_run, ["train.stop_at=2"])
    optimus.train(small_run, resume=True)
    first, second = found = records(small_run)
    assert (first["step"], second["step"]) == (0, 2)
    assert first["versions"]["optimus"] == optimus.__version__
    assert first["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert first["command"] == second["command"]
    assert Path(first["command"][0]).name.startswith("python")
    assert first["folder"] == os.getcwd()
    assert (first["ranks"], first["layout"]["dp"], first["layout"]["pp"]) == (1, 1, 1)
    assert {"time", "host", "machine", "device", "git"} <= first.keys()
    assert "a-secret-of-the-environment" not in json.dumps(found)


def test_a_configuration_that_is_no_text_is_renamed(small_run: dict[str, Any]) -> None:
    optimus.train(small_run, ["train.stop_at=2"])
    folder = Path(small_run["train"]["output"])
    (folder / "config.yaml").write_bytes(b"\xff")
    optimus.train(small_run, resume=True)
    assert (folder / "config.until-step-2.yaml").read_bytes() == b"\xff"


def test_a_commit_and_whether_it_is_clean(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *words], cwd=tmp_path, check=True)

    assert git_commit(tmp_path) is None
    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message", "first")
    head = git_commit(tmp_path)
    assert head is not None
    assert len(head["commit"]) == 40
    assert head["clean"] is True
    (tmp_path / "other").write_text("not tracked")
    assert git_commit(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == {**head, "clean": False}
