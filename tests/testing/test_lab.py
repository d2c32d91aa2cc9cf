"""Runs that lose nodes in the lab recover as their event logs tell, and end with the weights of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml

import optimus
from benchmarks.browser import browser
from helpers.browser import HAS_BROWSER, opened
from helpers.silent_backend import PYTHONPATH
from optimus.checkpoint.folder import list_checkpoints
from optimus.cli import app
from optimus.errors import UserError
from optimus.launch.nodes import NodeJob
from optimus.observe.metrics import read_metrics
from optimus.resilience.events import EventKind, EventLog
from optimus.resilience.exclusion import excluded
from optimus.testing import lab as laboratory
from optimus.testing.faults import FaultPlan
from optimus.testing.lab import Lab, lab, namespaces_allowed, rehearse

STEPS = 15
KEEP_ALIVE = (1, 5)  # not less: other tests run at the same time


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips where network namespaces are not allowed."""
    if not namespaces_allowed():
        pytest.skip("network namespaces are not allowed here (Linux, root)")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Fails if the lab leaves a process, a namespace or a file in /etc."""
    before = psutil.pids()
    yield
    tags = f"o{os.getpid()}n", f"o{os.getpid()}s"  # nodes, and the store and the switch
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout if _has_ip() else ""
    assert not [name for name in names.splitlines() if name.startswith(tags)]
    assert not [path for path in Path("/etc/netns").glob("*") if path.name.startswith(tags)]
    words = (
        "optimus.testing.lab",
        "optimus.testing.faults",
        "optimus.launch.rank",
        "optimus.launch.store",
        "sleep 1234",
    )
    left = [process for process in psutil.process_iter(["pid", "cmdline"]) if process.pid not in before]
    lines = [" ".join(process.info["cmdline"] or []) for process in left]
    assert not [line for line in lines if str(tmp_path) in line and any(word in line for word in words)]


def _has_ip() -> bool:
    return subprocess.run(["which", "ip"], capture_output=True).returncode == 0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Gives each rank one thread, because ranks outnumber cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Selects the backend: Gloo, whose collectives raise if a rank is lost, or one that behaves as NCCL does.

    The handles of the latter never raise, and its watchdog aborts ranks that wait for a lost one.
    """
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        if name == "silent":
            patch.setenv("PYTHONPATH", PYTHONPATH, prepend=os.pathsep)
        yield name


def on_backends(turn: int) -> Any:
    """Parametrizes a test with both backends, each in its turn of ten."""
    turns = {"gloo": turn, "silent": turn + 5}
    cases = [pytest.param(name, marks=pytest.mark.in_turn(number, 10)) for name, number in turns.items()]
    return pytest.mark.parametrize("backend", cases, indirect=True, scope="module")


def configuration(prepared: Path, folder: Path, hang: int = 600, **checkpoint: int) -> Path:
    """Writes the configuration of a run of a tiny model in `folder`/run, on any number of ranks that divides 12.

    The default limit for hangs is longer than a run, so that a busy machine looks like no hang.
    """
    tiny = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 16, "experts": 4, "experts_per_token": 2}
    run = {
        "model": {"family": "olmoe", "vocab": 320, **tiny},
        "data": {"path": str(prepared)},
        "train": {
            "output": str(folder / "run"),
            "steps": STEPS,
            "global_batch": 12,
            "micro_batch": 2,
            "sequence_length": 32,
            "precision": "float32",
        },
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 2},
        "checkpoint": {"every": 3, "keep": 3, **checkpoint},
        "resilience": {"hang": hang},
        "observe": {"tensorboard": False, "notify": f"sh -c 'cat >> {folder}/told; echo >> {folder}/told'"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def perform(
    config: Path,
    plan: FaultPlan,
    *,
    nodes: int = 3,
    spares: int = 2,
    ranks_per_node: int = 1,
    wait: float = 30.0,
    **settings: Any,
) -> dict[str, Any]:
    """Runs the lab; returns the result of `rehearse` without events of the plan and of ranks that are only slow."""
    file = config.with_name("plan.yaml")
    plan.write(file)
    job = NodeJob(config, (), nodes, spares, ranks_per_node, KEEP_ALIVE, wait)
    result = rehearse(job, inject=file, limit=240.0, **settings)
    result["events"] = [event for event in result["events"] if "times as long" not in event["detail"]]
    injected = [event for event in result["events"] if event["kind"] == "injected"]
    result["events"] = [event for event in result["events"] if event["kind"] != "injected"]
    result["kinds"] = [event["kind"] for event in result["events"]]
    assert sorted((event["rank"], event["step"]) for event in injected) == sorted(
        (fault.rank, fault.step) for fault in plan.faults if fault.kind != "slow"
    )
    result["log"] = {path.stem: path.read_text() for path in (config.parent / "run" / "lab").glob("*.log")}
    assert not [node for node, text in result["log"].items() if "Traceback" in text], result["log"]
    assert not [*(config.parent / "run").glob(".hang*"), *(config.parent / "run").glob(".fault*")]
    for event in [*injected, *result["events"]]:
        print({name: value for name, value in event.items() if value not in (None, "")})
    return result


def end_of(config: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of all steps, and the final weights."""
    records = read_metrics(config.parent / "run")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    newest = list_checkpoints(config.parent / "run")[-1]
    assert newest.name.endswith(str(STEPS))
    return [record["loss"] for record in records], optimus.load_model(newest).state_dict()


@pytest.fixture(scope="module")
def undisturbed(
    namespaces: None, backend: str, prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], tuple[list[float], dict[str, torch.Tensor]]]:
    """A run without faults, and its losses and weights."""
    config = configuration(prepared, tmp_path_factory.mktemp("undisturbed"))
    return perform(config, FaultPlan()), end_of(config)


def check_same_end(config: Path, expected: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, weights = end_of(config)
    assert losses == expected[0]
    assert weights.keys() == expected[1].keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[1][name]), name


@pytest.mark.slow
@on_backends(0)
def test_nothing_fails(undisturbed: Any) -> None:
    result, _ = undisturbed
    assert result["isolated"]
    assert result["finished"]
    assert result["exit_codes"] == {f"node{number}": 0 for number in range(5)}  # two of them are spares
    assert result["kinds"] == ["finished"]
    assert "hostname of the client socket" not in "".join(result["log"].values())


@pytest.mark.slow
@on_backends(1)
def test_a_rank_then_a_link_then_the_first_node_are_lost(
    backend: str, undisturbed: Any, prepared: Path, tmp_path: Path
) -> None:
    config = configuration(prepared, tmp_path)
    result = perform(config, FaultPlan().kill(1, 4).cut(2, 8).kill_agent(0, 12))
    assert result["finished"]
    assert result["kinds"] == [*["failure", "restart", "recovered"] * 3, "finished"]
    crash, cut, lost = (event for event in result["events"] if event["kind"] == "failure")
    assert crash["rank"] == 1
    assert crash["detail"] == "rank 1 crashed (killed by SIGKILL)"
    for event in (cut, lost):
        assert event["detail"] == f"node {event['node']} has been silent for 5 s"
        assert event["seconds"] >= 5
    assert cut["node"] != lost["node"]
    recovered = [event for event in result["events"] if event["kind"] == "recovered"]
    assert [event["step"] for event in recovered] == [4, 7, 10]  # each resumes one step after the newest checkpoint
    assert [event["detail"] for event in recovered] == [event["detail"] for event in (crash, cut, lost)]
    codes = result["exit_codes"]
    assert codes.pop(lost["node"]) == -9
    assert codes.pop(cut["node"]) != 0
    assert list(codes.values()) == [0, 0, 0]
    assert excluded(tmp_path / "run") == []  # no node is at fault, not even one that the watchdog aborted
    assert ("Fatal Python error: Aborted" in "".join(result["log"].values())) == (backend == "silent")
    check_same_end(config, undisturbed[1])


@pytest.mark.slow
@on_backends(2)
def test_a_rank_hangs_another_is_not_finite_and_a_checkpoint_is_torn(
    undisturbed: Any, prepared: Path, tmp_path: Path
) -> None:
    config = configuration(prepared, tmp_path, hang=8)
    plan = FaultPlan().hang(2, 4).nan(1, 8).tear_checkpoint(0, 9).kill(0, 12)
    result = perform(config, plan)
    assert result["finished"]
    gone = ["failure", "exclusion", "restart", "recovered"]
    assert result["kinds"] == [*gone, *gone, "failure", "restart", "recovered", "finished"]
    hang, soft, crash = (event for event in result["events"] if event["kind"] == "failure")
    assert (hang["rank"], hang["step"], hang["seconds"]) == (2, 4, 8)
    assert hang["detail"].startswith("rank 2 did not continue; the other ranks waited in ")
    assert (soft["rank"], soft["step"]) == (1, 8)
    assert soft["detail"].startswith("rank 1 produced numbers that are not finite, first in ")
    assert crash["detail"] == "rank 0 crashed (killed by SIGKILL)"
    out = [event["node"] for event in result["events"] if event["kind"] == "exclusion"]
    assert out == excluded(tmp_path / "run") == [hang["node"], soft["node"]]
    assert crash["node"] not in out
    recovered = [event["step"] for event in result["events"] if event["kind"] == "recovered"]
    assert recovered == [4, 7, 7]  # the checkpoint before the torn one of step 9
    assert {node for node, code in result["exit_codes"].items() if code} == set(out)
    check_same_end(config, undisturbed[1])


@pytest.mark.slow
@on_backends(3)
@pytest.mark.usefixtures("backend")
def test_divergence_is_nobodys_fault_and_a_spare_is_there_for_who_is_lost_later(prepared: Path, tmp_path: Path) -> None:
    """Divergence excludes no node, so a spare can replace a node that is lost later.

    The lab uses plain processes. Losses differ from the undisturbed run's after a restart with fresh moments.
    """
    config = configuration(prepared, tmp_path, weights_every=3)
    plan = FaultPlan().nan(0, 5).nan(1, 5).nan(2, 5).kill_agent(1, 8)
    result = perform(config, plan, spares=1, plain=True)
    assert not result["isolated"]
    assert result["finished"]
    diverged = ["failure", "rollback", "restart", "recovered"]
    assert result["kinds"] == [*diverged, "failure", "restart", "recovered", "finished"]
    first, second = (event for event in result["events"] if event["kind"] == "failure")
    assert first["node"] is None
    assert "on ranks 0, 1, 2: the training has diverged" in first["detail"]
    assert result["events"][1]["step"] == 3
    assert second["detail"] == f"node {second['node']} has been silent for 5 s"
    assert excluded(tmp_path / "run") == []
    assert result["exit_codes"].pop(second["node"]) == -9
    assert set(result["exit_codes"].values()) == {0}
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [each["event"] for each in told] == ["restarted", "restarted", "finished"]
    assert [first["detail"] in told[0]["detail"], second["detail"] in told[1]["detail"]] == [True, True]
    assert {each["report"] for each in told} == {str(tmp_path / "run" / "report.html")}
    if HAS_BROWSER:
        with browser() as chromium:
            _, seen = opened(chromium, tmp_path / "run" / "report.html")
        assert all(event["detail"] in seen["text"] for event in result["events"])
    losses, _ = end_of(config)
    assert all(loss < 6 for loss in losses)


@pytest.mark.slow
@pytest.mark.in_turn(1, 10)
def test_crashes_are_counted_by_node_and_kind(prepared: Path, tmp_path: Path) -> None:
    """Two nodes crash once by software, and stay; the node whose hardware crashes leaves at once."""
    config = configuration(prepared, tmp_path)
    result = perform(config, FaultPlan().kill(0, 2).kill(1, 5).segfault(1, 8), nodes=2, spares=1, plain=True)
    assert result["finished"]
    crash = ["failure", "restart", "recovered"]
    assert result["kinds"] == [*crash, *crash, "failure", "exclusion", "restart", "recovered", "finished"]
    failures = [event for event in result["events"] if event["kind"] == "failure"]
    assert [event["detail"] for event in failures] == [
        "rank 0 crashed (killed by SIGKILL)",
        "rank 1 crashed (killed by SIGKILL)",
        "rank 1 crashed (killed by SIGSEGV, which names hardware)",
    ]
    assert excluded(tmp_path / "run") == [failures[-1]["node"]]
    assert result["exit_codes"].pop(failures[-1]["node"]) == 1
    assert set(result["exit_codes"].values()) == {0}
    end_of(config)  # every step has been trained


@pytest.mark.slow
@on_backends(4)
@pytest.mark.usefixtures("backend")
def test_a_full_disk_and_then_more_nodes_lost_than_there_are_spares(prepared: Path, tmp_path: Path) -> None:
    """A full disk and a lack of nodes each end the run with a message on every node; another launch resumes the run."""
    config = configuration(prepared, tmp_path)
    full = perform(config, FaultPlan().fill_disk(0, 6), nodes=2, spares=0, plain=True)
    assert not full["finished"]
    assert set(full["exit_codes"].values()) == {2}
    assert "failure" in full["kinds"]
    assert not {"restart", "finished"} & set(full["kinds"])
    for text in full["log"].values():
        assert "the run has been stopped: the run cannot continue with this configuration: " in text
        assert "No space left on device" in text

    few = perform(config, FaultPlan().kill_agent(1, 8), nodes=2, spares=0, wait=8.0, plain=True)
    assert not few["finished"]
    assert few["kinds"] == ["recovered", "failure", "failure"]
    recovered, silent, end = few["events"]
    assert recovered["step"] == 4
    assert silent["detail"] == f"node {silent['node']} has been silent for 5 s"
    assert end["detail"] == "fewer than 2 nodes have joined within 8 s"
    assert few["exit_codes"].pop(silent["node"]) == -9
    ((last, code),) = few["exit_codes"].items()
    assert code == 1
    assert f"error: {end['detail']}: start more nodes, or set a smaller --nodes" in few["log"][last]
    steps = [record["step"] for record in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, 8))  # resumed where the disk was full


def test_a_lab_that_is_interrupted(namespaces: None, tmp_path: Path) -> None:
    """An interrupted lab leaves nothing behind (`nothing_left`)."""
    pids: list[int] = []

    def interrupted() -> None:
        with lab(2, isolated=True, bandwidth="10Mbit") as cluster:
            for host in cluster.hosts:
                shaped = subprocess.run(["tc", "-n", host, "qdisc"], capture_output=True, text=True).stdout
                assert "tbf" in shaped
            pids.extend(start_all(cluster, tmp_path / "log"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all_end(pids)


def test_a_plain_lab_that_is_interrupted(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with lab(2, isolated=False) as cluster:
            pids.extend(start_all(cluster, tmp_path / "log"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all_end(pids)


TERMINATED = """
import pathlib, sys, time
from optimus.testing.lab import lab
with lab(2, isolated=sys.argv[1] == "isolated") as cluster:
    for host in cluster.hosts:
        cluster.start(host, ["sleep", "1234"], pathlib.Path(sys.argv[2]))
    print(*(process.pid for process in cluster._processes.values()), flush=True)
    time.sleep(60)
"""


@pytest.mark.swept
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("kind", ["isolated", "plain"])
@pytest.mark.usefixtures("default_signals")
def test_a_lab_that_is_sent_a_signal_takes_everything_down(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    if kind == "isolated":
        request.getfixturevalue("namespaces")
    command = [sys.executable, "-c", TERMINATED, kind, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert all_end(pids)
    if kind == "isolated":
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"o{process.pid % 100000}" not in names
        assert not list(Path("/etc/netns").glob(f"o{process.pid % 100000}*"))


def start_all(cluster: Lab, log: Path) -> list[int]:
    """Starts a process on each host with two children, one in another session, as ranks are; returns all six ids."""
    for host in cluster.hosts:
        cluster.start(host, ["sh", "-c", "setsid sleep 1234 & sleep 1234"], log)
    deadline = time.monotonic() + 300
    while True:
        found = [psutil.Process(cluster._processes[host].pid) for host in cluster.hosts]
        pids = [each.pid for process in found for each in (process, *process.children(recursive=True))]
        if len(pids) == 6:
            return pids
        assert time.monotonic() < deadline
        time.sleep(0.05)


def all_end(pids: list[int]) -> bool:
    """Returns whether these processes end within the time that a signal takes to arrive."""
    deadline = time.monotonic() + 10
    while True:
        found = [process for process in psutil.process_iter(["status"]) if process.pid in pids]
        if all(process.info["status"] == psutil.STATUS_ZOMBIE for process in found):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def test_labs_of_two_processes_have_different_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for pid in (4_007, 104_007):
        monkeypatch.setattr(laboratory.os, "getpid", lambda pid=pid: pid)
        with lab(1, isolated=False) as cluster:
            found += cluster.hosts
    assert len({*found}) == 2


def test_the_id_of_an_ended_command_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may get the id, and the lab must not end the children of that process."""
    cluster = Lab(["host"], "", isolated=False)
    cluster.start("host", ["true"], tmp_path / "log")
    assert cluster.wait(["host"], 30) == {"host": 0}
    monkeypatch.setattr(
        laboratory.psutil, "Process", lambda pid: SimpleNamespace(children=lambda recursive: [SimpleNamespace(pid=1)])
    )
    assert cluster._pids("host") == []
    killed: list[int] = []
    monkeypatch.setattr(laboratory.psutil, "pid_exists", lambda pid: True)
    monkeypatch.setattr(laboratory.os, "killpg", lambda pid, number: killed.append(pid))
    cluster.stop()
    assert not killed


def test_what_an_ended_command_leaves_is_killed(tmp_path: Path) -> None:
    cluster = Lab(["host"], "", isolated=False)
    cluster.start("host", ["sh", "-c", "sleep 1234 & echo $!"], log := tmp_path / "log")
    assert cluster.wait(["host"], 30) == {"host": 0}
    left = psutil.Process(int(log.read_text()))
    cluster.stop()
    with suppress(psutil.NoSuchProcess):
        assert left.wait(30) is None or not left.is_running()


def test_hosts_that_cannot_be_made(namespaces: None) -> None:
    with (
        pytest.raises(UserError, match=r"the lab cannot make its hosts: `tc .*` says: "),
        lab(1, isolated=True, bandwidth="plenty"),
    ):
        raise AssertionError("it was made")


class Rehearsed:
    """A cluster of one node that writes an event at each poll, and ends at the fourth."""

    hosts = ("n0",)
    endpoint = "127.0.0.1:1"

    def __init__(self, run: Path, seen: Callable[[], str]) -> None:
        self._log, self._seen = EventLog(run), seen
        self.after: list[str] = []  # the text printed by the time each event but the last was seen

    def start(self, host: str, command: Sequence[str], log: Path) -> None: ...

    def wait(self, hosts: Sequence[str], seconds: float) -> dict[str, int | None]:
        kinds: tuple[EventKind, ...] = ("failure", "restart", "finished")
        if len(self.after) == len(kinds):
            return {"n0": 0}
        self.after.append(self._seen())
        self._log.write(kinds[len(self.after) - 1], node="n0", detail=f"number {len(self.after)}")
        return {"n0": None}


@pytest.mark.parametrize("as_json", [False, True])
def test_events_are_printed_when_they_happen(
    as_json: bool, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events appear at once, even if standard output is a pipe, which buffers."""
    config, (read, write) = configuration(prepared, tmp_path), os.pipe()
    os.set_blocking(read, False)
    printed = ""

    def seen() -> str:
        nonlocal printed
        with suppress(BlockingIOError):
            printed += os.read(read, 1 << 16).decode()
        return printed

    cluster = Rehearsed(tmp_path / "run", seen)
    monkeypatch.setattr(laboratory, "lab", lambda *given, **named: nullcontext(cluster))
    with os.fdopen(write, "w") as pipe:  # buffered as any pipe
        monkeypatch.setattr(sys, "stderr" if as_json else "stdout", pipe)
        app(["lab", str(config), "--nodes", "1", "--plain", *(["--json"] if as_json else [])], standalone_mode=False)
        monkeypatch.undo()
    assert cluster.after == ["", line(1), line(1) + line(2)]


def line(number: int) -> str:
    return f"{('failure', 'restart')[number - 1]:10} n0       number {number}\n"
