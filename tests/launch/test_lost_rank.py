"""A rank is killed or hangs during a run: the other ranks end with a message, and no saved data are lost."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import optimus
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.comm.device_waits import DeviceWaits
from optimus.comm.recorder import Recorder
from optimus.errors import UserError
from optimus.launch import rank as program
from optimus.launch.messages import explain
from optimus.observe.metrics import read_metrics
from optimus.resilience.exits import EndedError, Exit

STOPPED = r"step \d+: [\w ]+ of [\d,]+ bytes over ranks 0, 1, 2 failed on rank [02]: .+\. Run again with --resume"
SAVED = r" \(the run is saved up to step (\d+)\)"


def start(config: dict[str, Any], folder: Path, *command: str) -> subprocess.Popen[str]:
    """Starts `optimus train` on three ranks with `command`, a Python module; waits until step 12."""
    config["train"]["steps"] = 100_000
    config["checkpoint"] = {"every": 5, "keep": 2}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            *command,
            "train",
            str(file),
            *([] if "torch.distributed.run" in command else ["--ranks=3"]),
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("w"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    metrics = Path(config["train"]["output"]) / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 12, 120, process)
    return process


def wait_until(condition: Callable[[], bool], seconds: float, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "it has ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(process: psutil.Process) -> bool:
    """Returns whether a process lives. Ended children whose exit code the launcher has not read yet do not count."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def signal_rank(launcher: subprocess.Popen[str], rank: int, number: signal.Signals) -> None:
    children = psutil.Process(launcher.pid).children(recursive=True)
    (child,) = [child for child in children if child.environ().get("RANK") == str(rank)]
    child.send_signal(number)


def end_of(process: subprocess.Popen[str], folder: Path, seconds: float) -> Sequence[str]:
    """Returns the printed errors after the process and its children have ended; kills them after `seconds`."""
    launcher = psutil.Process(process.pid)
    children = launcher.children(recursive=True)
    try:
        assert process.wait(seconds) != 0
        assert not [child for child in children if runs(child)]
    finally:
        for child in [*children, launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    text = (folder / "stderr").read_text()
    if "torch.distributed.run" not in process.args:  # type: ignore[operator]  # torchrun adds reports of its own
        assert process.returncode == 2
        assert "Traceback" not in text
    return re.findall("error: (.*)", text)


def check_resumes(config: dict[str, Any], saved: int) -> None:
    """Asserts that nothing up to step `saved` is lost, and that a run on one rank resumes there."""
    folder = Path(config["train"]["output"])
    newest = list_checkpoints(folder)[-1]
    assert read_description(newest).step == saved
    assert optimus.load_model(newest)(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()
    before = [record["loss"] for record in read_metrics(folder)][:saved]
    assert len(before) == saved
    config["train"]["stop_at"] = saved + 2
    optimus.train(config, resume=True)
    records = read_metrics(folder)
    assert [record["step"] for record in records] == list(range(1, saved + 3))
    assert [record["loss"] for record in records][:saved] == before


@pytest.fixture
def three_ranks(small_run: dict[str, Any]) -> dict[str, Any]:
    """The small run on three ranks with sharded gradients."""
    small_run["train"] |= {"global_batch": 12, "micro_batch": 2, "precision": "float32"}
    small_run["state"] = {"shard": "gradients"}
    return small_run


def listening(process: subprocess.Popen[str]) -> set[str]:
    """Returns the addresses on which the launcher and its ranks listen."""
    launcher = psutil.Process(process.pid)
    found = [each for one in (launcher, *launcher.children(recursive=True)) for each in one.net_connections()]
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(three_ranks: dict[str, Any], tmp_path: Path) -> None:
    process = start(three_ranks, tmp_path, "optimus")
    assert listening(process) == {"127.0.0.1"}  # no other machine reaches what ranks here say to each other
    signal_rank(process, 1, signal.SIGKILL)
    (message,) = end_of(process, tmp_path, 60)
    parts = re.fullmatch(rf"rank 1 was lost \(killed by SIGKILL\); the others stopped: {STOPPED}{SAVED}", message)
    assert parts, message
    check_resumes(three_ranks, int(parts[1]))


@pytest.mark.in_turn(0, 1)
@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_by_the_timeout(three_ranks: dict[str, Any], tmp_path: Path) -> None:
    """The other ranks end at the timeout; the launcher kills the hanging rank 30 s later."""
    three_ranks["resilience"] = {"timeout": 10}
    process = start(three_ranks, tmp_path, "optimus")
    began = time.monotonic()
    signal_rank(process, 1, signal.SIGSTOP)
    others = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.environ().get("RANK") in ("0", "2")
    ]
    wait_until(lambda: not any(map(runs, others)), 35, process)
    assert time.monotonic() - began >= 8  # not before the timeout
    (message,) = end_of(process, tmp_path, 60)
    parts = re.fullmatch(rf"rank 1 did not answer and was killed; the others stopped: {STOPPED}{SAVED}", message)
    assert parts, message
    check_resumes(three_ranks, int(parts[1]))


@pytest.mark.in_turn(0, 1)
@pytest.mark.slow
def test_under_torchrun_each_rank_says_why_it_ends(three_ranks: dict[str, Any], tmp_path: Path) -> None:
    torchrun = "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "optimus"
    process = start(three_ranks, tmp_path, *torchrun)
    signal_rank(process, 1, signal.SIGKILL)
    messages = end_of(process, tmp_path, 60)
    assert len(messages) == 2
    for message in messages:
        assert re.fullmatch(STOPPED + SAVED, message), message


@pytest.mark.in_turn(1, 2)
def test_a_rank_that_never_comes(small_run: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(small_run | {"resilience": {"timeout": 2}}))
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "USE_LIBUV": "1"}
    command = [sys.executable, "-m", "optimus", "train", str(file)]
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert re.search(r"^error: the ranks have not connected within 2 s \(resilience.timeout\): ", done.stderr, re.M)
    assert "Traceback" not in done.stderr


def failure(folder: Path, rank: int, code: int, when: int, text: str | None = None) -> ProcessFailure:
    """Returns TorchElastic's report of a rank that exited with `code` and left `text`."""
    file = folder / f"error{rank}.json"
    if text is not None:
        extra = {"py_callstack": "", "timestamp": str(when)}
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    made = ProcessFailure(rank, 1, code, str(file))
    made.timestamp = when
    return made


BROKEN = "CollectiveError: step 7: all_reduce failed on rank {}: closed"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (
            [(-9, 100, None), (2, 100, BROKEN)],
            "rank 0 was lost (killed by SIGKILL); the others stopped: step 7: .* rank 1: closed",
        ),
        ([(-9, 100, None), (2, 99, BROKEN)], "rank 0 was lost .*"),  # the kill is noticed after rank 1's error
        (
            [(2, 100, BROKEN), (7, 100, None), (-15, 100, None)],
            "rank 1 was lost (exit code 7); .* failed on rank 0: closed",
        ),
        ([(-9, 130, None), (2, 100, BROKEN)], "rank 0 did not answer and was killed; the others stopped: step 7: .*"),
        ([(2, 100, BROKEN), (2, 101, "UserError: no room")], "rank 1 failed: no room"),
        ([(2, 100, BROKEN), (2, 101, "BadFileError: a.txt: not UTF-8")], "rank 1 failed: a.txt: not UTF-8"),
        ([(2, 100, BROKEN), (2, 101, "EndedError: step 3: no memory")], "rank 1 failed: step 3: no memory"),
        ([(-15, 100, None), (1, 100, "KeyError: 'x'")], "rank 1 failed: KeyError: 'x'"),
        (
            [(2, 101, BROKEN), (2, 100, BROKEN)],
            "the ranks have lost their connection: step 7: .* failed on rank 1: closed",
        ),
        ([(-15, 100, None), (-15, 100, None)], "rank 0 was lost (killed by SIGTERM)"),
        # Watchdogs ended ranks 0 and 2
        ([(-6, 100, None), (-9, 100, None), (-6, 100, None)], "rank 1 was lost (killed by SIGKILL)"),
    ],
)
def test_the_cause_is_told_from_its_consequences(
    tmp_path: Path, ends: Sequence[tuple[int, int, str | None]], expected: str
) -> None:
    failures = {
        rank: failure(tmp_path, rank, code, when, text and text.format(rank))
        for rank, (code, when, text) in enumerate(ends)
    }
    pattern = re.escape(expected).replace(r"\.\*", ".*").replace(r"\ ", " ")
    assert re.fullmatch(pattern, explain(failures)), explain(failures)


class Stuck:
    """Makes events of a stream: the first has passed, and no other ever passes."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Any:
        self.made += 1
        return SimpleNamespace(query=lambda first=self.made == 1: first)


def test_a_rank_whose_device_waits_too_long_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank whose device waits too long names the collective, writes torch's flight record, and exits before its
    backend aborts."""
    ended, codes = threading.Event(), []
    monkeypatch.setattr(program, "_leave", lambda code: (codes.append(code), ended.set()))
    recorder = Recorder()
    recorder.device = DeviceWaits(Stuck())
    config = SimpleNamespace(resilience=SimpleNamespace(timeout=0.05))
    groups = SimpleNamespace(recorder=recorder, rank=0)
    progress = SimpleNamespace(step=6)
    trainer: Any = SimpleNamespace(groups=groups, config=config, progress=progress, folder=tmp_path)
    with program._deadline(trainer):
        recorder.wait(("0, 1", "all_reduce", 3), [])
        assert ended.wait(10)
    assert codes == [Exit.LOST]
    assert "version" in json.loads((tmp_path / "flight-record-0.json").read_text())
    expected = "step 7: all_reduce over ranks 0, 1 failed on rank 0: the device has waited for 0.05 s"
    assert f"error: {expected} (resilience.timeout)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EIO, "Input/output error"), Exit.HARDWARE),
        (UserError("no width"), Exit.USER),
        (KeyError("x"), None),
    ],
)
def test_a_rank_whose_hardware_fails_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: Exit | None
) -> None:
    """The exit code names hardware only for an error of hardware; any other exception ends the process as usual."""

    def fails(*_: Any) -> int:
        raise error

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(program, "run_rank", fails)
    monkeypatch.setattr(program, "_leave", leave)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    (tmp_path / "run.yaml").touch()
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(type(error) if code is None else SystemExit) as ended:
            program.run_as_rank([str(tmp_path / "run.yaml")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert code is None or ended.value.code == code  # type: ignore[union-attr]


def test_lack_of_memory_is_nobodys_loss() -> None:
    trainer: Any = SimpleNamespace(
        groups=SimpleNamespace(rank=2), run=SimpleNamespace(device="xpu:0"), progress=SimpleNamespace(step=6)
    )
    with (
        pytest.raises(
            EndedError,
            match=r"^step 7: rank 2 has no memory left on xpu:0 \(full\. 2 GiB is reserved but unallocated\): choose a",
        ) as error,
        program._naming_failures(trainer),
    ):
        raise torch.OutOfMemoryError("full. 2 GiB is reserved but unallocated. If reserved memory is large, try")
    assert program.code_of(error.value) == Exit.USER


@pytest.mark.parametrize(
    ("named", "per_node", "backend"),
    [("xpu", 4, "xccl"), ("xpu:0", 4, "gloo"), ("xpu:0", 1, "xccl"), ("auto", 4, "xccl")],
)
def test_ranks_that_share_a_device_use_gloo(named: str, per_node: int, backend: str) -> None:
    assert program.backend_of(torch.device("xpu:0"), named, per_node) == backend
