"""What follows a run's end: events that say why, the report, a notification, the summary."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import optimus
from optimus.errors import UserError
from optimus.report.folder import read_folder
from optimus.report.listing import runs
from tests.report.conftest import embedded


def telling(folder: Path) -> str:
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write(sys.stdin.read() + '\\n')"
    return shlex.join([sys.executable, "-c", program, str(folder / "told")])


def test_stopped_finished_and_failed(small_run: dict[str, Any], tmp_path: Path) -> None:
    small_run["observe"] |= {"notify": telling(tmp_path)}
    small_run["train"]["stop_at"] = 2
    folder = Path(small_run["train"]["output"])
    summary = optimus.train(small_run)
    assert read_folder(folder).state == ("stopped", "at train.stop_at")
    assert summary["report"] == str(folder / "report.html")
    assert summary["seconds"] > 0
    small_run["train"]["stop_at"] = None
    damaged = small_run | {"optimizer": {"clip_during_warmup": True, "eps": 1e-30}, "resilience": {"max_skipped": 0}}
    damaged["lr_schedule"] = {"peak": 1e30, "minimum": 0.0, "warmup_steps": 0}
    with pytest.raises(UserError, match="not finite"):
        optimus.train(damaged, resume=True)
    state, why = read_folder(folder).state
    assert state == "failed"
    assert "not finite" in why
    (found,) = embedded((folder / "report.html").read_text())["runs"]
    assert found["state"] == "failed"
    assert [event["kind"] for event in found["events"]] == ["stopped", "error"]
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [(each["event"], each["run"]) for each in told] == [("stopped", str(folder)), ("failed", str(folder))]
    assert told[0]["step"] == 2
    assert "not finite" in told[1]["detail"]


def test_a_run_to_its_end(small_run: dict[str, Any]) -> None:
    small_run["observe"] |= {"report": False, "notify": "/no/such/program"}
    summary = optimus.train(small_run)
    assert summary["report"] is None
    (row,) = runs(summary["output"])
    assert (row["state"], row["step"], row["loss"]) == ("finished", 6, summary["loss"])
    assert row["parameters"] > 0
