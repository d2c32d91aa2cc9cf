"""Runs that end early: by signals, with their launcher, without their terminal; and the lease on the run folder."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import optimus
from helpers.sweep import in_turns
from optimus.checkpoint import saving
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.checkpoint.lease import LEASE, LeaseError
from optimus.checkpoint.rollback import rollback
from optimus.config import dump_config, load_config
from optimus.errors import UserError
from optimus.launch.rank import run_rank
from optimus.launch.store import serve
from optimus.observe.metrics import read_metrics
from optimus.resilience.events import EventLog
from optimus.training.hooks.metrics import Metrics

pytestmark = pytest.mark.usefixtures("default_signals")


@pytest.fixture
def endless(small_run: dict[str, Any], tmp_path: Path) -> Path:
    """Returns the configuration file of a run that is too long to finish."""
    small_run["train"]["steps"] = 100_000
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_run))
    return path


def folder_of(config: Path) -> Path:
    return Path(yaml.safe_load(config.read_text())["train"]["output"])


@contextmanager
def running(config: Path, *words: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a command as a process until the end of the context; its temporary folder is `tmp` beside the configuration."""
    temporary = config.with_name("tmp")
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "optimus", *words],
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def training(config: Path, *words: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs `optimus train` and waits for its first step."""
    with running(config, "train", str(config), *words, **streams) as process:
        until(lambda: process.poll() is not None or steps(config) > 0)
        assert process.poll() is None
        yield process


def steps(config: Path) -> int:
    metrics = folder_of(config) / "metrics.jsonl"
    return len(read_metrics(metrics.parent)) if metrics.exists() else 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_saved(config: Path) -> None:
    """Checks that the last step is saved and the folder is free."""
    folder = folder_of(config)
    assert read_description(list_checkpoints(folder)[-1]).step == read_metrics(folder)[-1]["step"]
    assert not (folder / LEASE).exists()


@pytest.mark.in_turn(2, 3)
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_resume(endless: Path) -> None:
    with training(endless) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert "SIGINT: finishing the step, then saving a checkpoint\n" in err
    assert f"stopped by SIGINT before step 100000; continue with: optimus train {endless} --resume" in out
    check_saved(endless)


@pytest.mark.in_turn(1, 3)
def test_a_launcher_that_is_told_to_end_has_its_ranks_save(endless: Path) -> None:
    """The ranks of a launcher save as the launcher ends, and leave the temporary folder empty."""
    with training(endless, "--ranks", "2") as process:
        process.terminate()
        out, err = process.communicate()
    assert process.returncode == 143
    assert err.count("SIGTERM: finishing the step, then saving a checkpoint\n") == 1
    assert "stopped by SIGTERM before step 100000" in out
    check_saved(endless)
    assert list((endless.parent / "tmp").iterdir()) == []


@pytest.mark.in_turn(0, 3)
def test_one_rank_that_is_told_to_end_ends_the_run(endless: Path) -> None:
    with training(endless, "--ranks", "2") as process:
        ranks = psutil.Process(process.pid).children()
        next(rank for rank in ranks if rank.environ()["RANK"] == "1").terminate()
        out, err = process.communicate()
    assert process.returncode == 143
    assert "another rank was told to end: saving a checkpoint\n" in err
    assert "stopped by SIGTERM before step 100000" in out
    check_saved(endless)


@pytest.mark.parametrize("nodes", in_turns([1, 2], 2, always=1))
def test_a_node_that_is_told_to_end(endless: Path, nodes: int) -> None:
    """A node ends cleanly on SIGTERM, while its ranks train and while the node waits for another."""
    store = serve(0)
    words = ("launch", str(endless), "--nodes", str(nodes), "--rendezvous", f"127.0.0.1:{store.port}")
    with running(endless, *words) as process:
        until(lambda: process.poll() is not None or store.check(["optimus/holders"]))
        assert (folder_of(endless) / LEASE).exists()
        if nodes == 1:
            until(lambda: process.poll() is not None or steps(endless) > 0)
        process.terminate()
        _, err = process.communicate()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert not (folder_of(endless) / LEASE).exists()
    assert list((endless.parent / "tmp").iterdir()) == []
    if nodes == 1:
        check_saved(endless)
        assert [event["kind"] for event in EventLog(folder_of(endless)).read()] == ["stopped"]


@pytest.mark.in_turn(1, 2)
def test_a_terminal_that_is_gone(endless: Path) -> None:
    """A broken ssh connection signals the process and refuses its output; the run saves and ends."""
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    tty = os.ttyname(theirs)
    with training(endless, **streams, preexec_fn=lambda: (os.setsid(), os.open(tty, os.O_RDWR))) as process:
        os.close(theirs)
        os.close(ours)  # sends SIGHUP
        assert process.wait() == 129
    check_saved(endless)


@pytest.mark.in_turn(0, 2)
def test_nohup_is_respected(endless: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the run inherits the handler
    try:
        with training(endless, "--ranks", "2") as process:
            done = steps(endless)
            for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children()):
                each.send_signal(signal.SIGHUP)
            until(lambda: process.poll() is not None or steps(endless) > done + 5)
            assert process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.in_turn(1, 2)
def test_others_are_kept_out_while_it_lives_and_its_ranks_end_with_it(
    endless: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(endless)
    with training(endless, "checkpoint.every=1", "--ranks", "2") as process:
        until(lambda: list_checkpoints(folder) != [])
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        for refused in (lambda: optimus.train(endless, resume=True), lambda: rollback(folder, 1)):
            with pytest.raises(LeaseError, match=f"{folder} is held by process {process.pid} on ") as caught:
                refused()
            assert "is saved up to" not in str(caught.value)
        assert f"is held by process {process.pid} on " in optimus.train(endless, resume=True, check=True)["held"]
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(ranks, timeout=300)
        assert alive == []
    newest = read_description(list_checkpoints(folder)[-1]).step
    summary = optimus.train(endless, [f"train.stop_at={newest + 1}"], resume=True)
    assert summary["step"] == newest + 1
    assert f"{folder} was held by process {process.pid} on " in capfd.readouterr().err
    assert not (folder / LEASE).exists()


def test_a_run_whose_folder_was_taken_writes_no_more(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was stopped while another continued writes no further checkpoint."""
    folder = Path(small_run["train"]["output"])
    right = Metrics.after_step

    def after_step(self: Metrics, trainer: Any, record: Any) -> None:
        right(self, trainer, record)
        if record.step == 2:
            lease = folder / LEASE
            lease.write_text(lease.read_text().replace('"token": "', '"token": "another '))

    monkeypatch.setattr(Metrics, "after_step", after_step)
    monkeypatch.setattr("optimus.training.hooks.lease.BEAT", -1.0)
    small_run["checkpoint"] = {"every": 1}
    with pytest.raises(LeaseError, match=r"it was taken over by another run, .* ends without saving"):
        optimus.train(small_run)
    assert [read_description(path).step for path in list_checkpoints(folder)] == [1, 2]
    assert "another" in (folder / LEASE).read_text()


def test_a_run_that_is_beyond_its_end_has_finished(
    small_run: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that is resumed with fewer steps counts as finished, or a batch script would start it again and again."""
    optimus.train(small_run)
    small_run["train"]["steps"] = 4
    run_rank(dump_config(load_config(small_run)), True, node="n0")
    (event,) = EventLog(small_run["train"]["output"]).read()
    assert (event["kind"], event["step"]) == ("finished", 6)
    assert "the run is at step 6 already, and ends at 4: nothing is left to do" in capfd.readouterr().err


def test_an_error_of_a_hook_leaves_no_checkpoint_half_written(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes an asynchronous checkpoint has ended when the error is raised."""
    small_run["checkpoint"] = {"every": 2, "asynchronous": True}
    failed, write, right = threading.Event(), saving.write_slices, Metrics.after_step

    def write_late(*arguments: Any) -> Any:
        assert failed.wait(60)
        return write(*arguments)

    def after_step(self: Metrics, trainer: Any, record: Any) -> None:
        right(self, trainer, record)
        if record.step == 3:
            failed.set()
            raise UserError("it is too hot")

    monkeypatch.setattr(saving, "write_slices", write_late)
    monkeypatch.setattr(Metrics, "after_step", after_step)
    with pytest.raises(UserError, match="it is too hot"):
        optimus.train(small_run)
    assert not [thread for thread in threading.enumerate() if thread.name == "optimus checkpoint"]
    assert list((Path(small_run["train"]["output"]) / "checkpoints").iterdir()) == []
    monkeypatch.undo()
    assert optimus.train(small_run, resume=True)["step"] == 6


def test_a_thread_that_is_not_the_main_one_trains(small_run: dict[str, Any]) -> None:
    """A notebook or a server may train in any thread of any name, and keeps its own signal handlers."""
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(optimus.train(small_run)["step"]), name="update_0")
    thread.start()
    thread.join(120)
    assert ended == [6]
