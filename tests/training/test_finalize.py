"""The end of a run: events with the reason, the report, a notification and the summary."""

import errno
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import optimus
from optimus.checkpoint.lease import Lease
from optimus.config.load import dump_config, load_config
from optimus.errors import UserError
from optimus.report.folder import read_folder
from optimus.report.listing import runs
from optimus.resilience.events import EventLog
from optimus.training.finalize import announce, conclude
from optimus.training.trainer import Hook, Trainer
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
    assert page_state(folder) == "stopped"
    assert summary["seconds"] > 0
    small_run["train"]["stop_at"] = None
    damaged = small_run | {"optimizer": {"clip_during_warmup": True, "eps": 1e-30}, "resilience": {"max_skipped": 0}}
    damaged["lr_schedule"] = {"lr": 1e30, "min_lr": 0.0, "warmup_steps": 0}
    with pytest.raises(UserError, match="not finite"):
        optimus.train(damaged, resume=True)
    state, why = read_folder(folder).state
    assert state == "failed"
    assert "not finite" in why
    (found,) = embedded((folder / "report.html").read_text())["runs"]
    assert found["state"] == "failed"
    assert [event["kind"] for event in found["events"]] == ["stopped", "resume", "error"]
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [(each["event"], each["run"]) for each in told] == [("stopped", str(folder)), ("failed", str(folder))]
    assert told[0]["step"] == 2
    assert "not finite" in told[1]["detail"]


def page_state(folder: Path) -> str:
    (found,) = embedded((folder / "report.html").read_text())["runs"]
    return str(found["state"])


class Interrupting(Hook):
    """A hook that sends Ctrl-C in the second step."""

    def before_step(self, trainer: Trainer) -> None:
        if trainer.progress.step == 1:
            signal.raise_signal(signal.SIGINT)


def test_the_report_of_an_interrupted_run_and_of_its_end(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(small_run["train"]["output"])
    assert optimus.train(small_run, hooks=[Interrupting])["stopped_by"] == "SIGINT"
    assert page_state(folder) == "stopped"
    optimus.train(small_run, resume=True)
    assert page_state(folder) == "finished"


def test_what_nodes_say_of_a_run_while_they_hold_it(small_run: dict[str, Any]) -> None:
    """A node's announcements set the state of the report, also where ranks have ended without last messages."""
    small_run["train"]["stop_at"] = 2
    optimus.train(small_run)
    small_run["train"]["stop_at"] = None
    config = load_config(small_run)
    folder = Path(config.train.output)
    (folder / "config.yaml").write_text(dump_config(config))
    with Lease(folder, "token", several=True):
        announce(config, "restarted", "")
        assert page_state(folder) == "running"
        EventLog(folder).write("failure", detail="node b has been silent for 15 s")
        announce(config, "failed", "")
        assert page_state(folder) == "failed"
        conclude(config, 0.0, {"step": 2, "steps": 6, "stopped_by": "SIGTERM"})
        assert page_state(folder) == "stopped"


def test_a_full_disk_does_not_hide_the_failure(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(small_run)
    folder = Path(config.train.output)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventLog, "write", full)
    conclude(config, 0.0, None, UserError("the cause"))
    assert f"cannot write {folder / 'events.jsonl'}: No space left on device" in capsys.readouterr().err


def test_a_run_to_its_end(small_run: dict[str, Any]) -> None:
    small_run["observe"] |= {"report": False, "notify": "/no/such/program"}
    summary = optimus.train(small_run)
    assert summary["report"] is None
    (row,) = runs(summary["output"])
    assert (row["state"], row["step"], row["loss"]) == ("finished", 6, summary["loss"])
    assert row["parameters"] > 0
