"""A run under a real Slurm of four nodes on this machine: how each event ends the job, and what is saved.

Scripts for PBS run there too, by Slurm's programs for users of PBS. The tests need Debian's `slurm-wlm` and root, and those
of PBS `slurm-wlm-torque` and `mpich`. They take minutes, so they have a marker of their own: `make slurm`.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.slurm import Job, Slurm, missing, missing_for_pbs, slurm
from optimus.checkpoint.folder import list_checkpoints, step_of
from optimus.data.preparation import prepare
from optimus.data.tokenizer import train
from optimus.disk import read_json_lines
from optimus.launch.nodes import NodeJob, write_batch_script
from optimus.resilience.events import EventLog
from optimus.resilience.scheduler import Scheduler

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(missing()), reason=missing())]

PROGRAMS = Path(sys.executable).parent
MOST_SECONDS_WITHOUT_RANKS = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        running.environment |= {"PATH": f"{PROGRAMS}:{running.environment['PATH']}", "OMP_NUM_THREADS": "1"}
        running.environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        yield running


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("\n".join(f"the {n} of {n * n} is {n * 7 % 13}" for n in range(20_000)))
    train(iter([text.read_text()]), 300, folder / "tokenizer.json")
    prepare([text], folder / "data", tokenizer=folder / "tokenizer.json", context=32, workers=1)
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 64, "vocab": 320}
    (folder / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"family": "llama", **sizes},
                "data": {"path": str(folder / "data")},
                "train": {"global_batch": 4, "micro_batch": 1, "sequence_length": 32, "steps": 400, "output": "run"},
                "checkpoint": {"every": 50},
                "observe": {"report": False},
            }
        )
    )
    return folder / "run.yaml"


@pytest.fixture(params=["slurm", "pbs"])
def system(request: pytest.FixtureRequest) -> Scheduler:
    if request.param == "pbs" and (why := missing_for_pbs()):
        pytest.skip(why)
    return request.param


class Run:
    """A run that has been submitted as a job."""

    def __init__(
        self,
        cluster: Slurm,
        config: Path,
        folder: Path,
        *overrides: str,
        nodes: int = 2,
        spares: int = 0,
        options: tuple[str, ...] = (),
        system: Scheduler = "slurm",
        limit: str = "1:00:00",
    ) -> None:
        self.cluster, self.folder = cluster, folder / "run"
        job = NodeJob(config, [f"train.output={self.folder}", *overrides], nodes, spares, 1, (1, 3), 60.0, 5)
        script = folder / "job.sh"
        write_batch_script(job, scheduler=system, path=script, time=limit)
        self.number = cluster.submit(script, *options) if system == "slurm" else cluster.submit_to_pbs(script)

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while self.steps()[-1:] < [step]:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        return [row["step"] for row in read_json_lines(path)] if path.exists() else []

    def end(self, *states: str, seconds: float) -> Job:
        """Waits for the job's end, and returns its state. No rank outlives the job, and the job its ranks by 60 s."""
        deadline, alone = time.monotonic() + seconds, None
        while (found := self.cluster.job(self.number)).state in ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, f"{found}\n{self.output}"
            if found.state != "RUNNING" or self.ranks():
                alone = None
            else:
                alone = alone or time.monotonic()
                assert time.monotonic() - alone < MOST_SECONDS_WITHOUT_RANKS, self.output
            time.sleep(0.5)
        assert found.state in states, f"{found}\n{self.output}"
        assert not self.ranks()
        return found

    def ranks(self, node: str | None = None) -> list[int]:
        """Returns the processes of this run's ranks, on all nodes or on one."""
        found = []
        for each in self.cluster.job(self.number).nodes if node is None else [node]:
            for pid in self.cluster.processes(each):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"optimus.launch.rank" in words:
                    found.append(pid)
        return found

    @property
    def output(self) -> str:
        return self.cluster.output(self.number)

    @property
    def saved(self) -> int:
        found = list_checkpoints(self.folder)
        return step_of(found[-1]) if found else 0

    def kinds(self) -> list[str]:
        return [event["kind"] for event in EventLog(self.folder).read()]


def check_no_traces(output: str) -> None:
    assert "Traceback" not in output, output
    assert "C++ CapturedTraceback" not in output, output
    assert not re.search(r"frame #\d+", output), output


def test_it_runs_through(cluster: Slurm, config: Path, tmp_path: Path, system: Scheduler) -> None:
    run = Run(cluster, config, tmp_path, spares=1, system=system)
    found = run.end("COMPLETED", seconds=180)
    assert found.exit_code == "0:0"
    assert run.saved == 400
    check_no_traces(run.output)


def test_a_rank_is_killed(cluster: Slurm, config: Path, tmp_path: Path, system: Scheduler) -> None:
    run = Run(cluster, config, tmp_path, spares=1, system=system)
    run.wait_for_step(60)
    os.kill(run.ranks()[0], signal.SIGKILL)
    assert run.end("COMPLETED", seconds=240).exit_code == "0:0"
    assert run.saved == 400
    assert "restart" in run.kinds()


def test_a_node_is_lost_and_a_spare_takes_its_place(
    cluster: Slurm, config: Path, tmp_path: Path, system: Scheduler
) -> None:
    run = Run(cluster, config, tmp_path, spares=1, system=system)
    run.wait_for_step(60)
    lost = other_node(run)
    cluster.lose(lost)
    try:
        assert run.end("COMPLETED", seconds=240).exit_code == "0:0"
    finally:
        cluster.start_node(lost)
    assert run.saved == 400


def other_node(run: Run) -> str:
    """Returns a node of the run that trains and does not host the batch script."""
    job = run.cluster.job(run.number)
    return next(node for node in job.nodes if node != job.host and run.ranks(node))


def test_a_node_is_lost_without_a_spare(cluster: Slurm, config: Path, tmp_path: Path, system: Scheduler) -> None:
    run = Run(cluster, config, tmp_path, "train.steps=100000", system=system)
    run.wait_for_step(60)
    lost = other_node(run)
    cluster.lose(lost)
    try:
        assert run.end("FAILED", "NODE_FAIL", seconds=240).exit_code == "1:0"
    finally:
        cluster.start_node(lost)
    assert run.saved >= 50
    assert "1 of 2 nodes are left and 2 are needed" in run.output


def test_the_data_are_not_there(cluster: Slurm, config: Path, tmp_path: Path, system: Scheduler) -> None:
    run = Run(cluster, config, tmp_path, f"data.path={tmp_path}/absent", system=system)
    assert run.end("FAILED", seconds=120).exit_code == "2:0"
    assert "absent" in run.output
    check_no_traces(run.output)


def test_the_time_is_up(cluster: Slurm, config: Path, tmp_path: Path, system: Scheduler) -> None:
    """Slurm warns the script 70 s before a limit of two minutes; the script for PBS warns itself 120 s before its
    limit."""
    options = ("--time=2", "--signal=B:TERM@70")
    limit = "0:04:01" if system == "pbs" else "1:00:00"
    run = Run(cluster, config, tmp_path, "train.steps=100000", options=options, system=system, limit=limit)
    run.wait_for_step(20)
    found = run.end("FAILED", seconds=230)
    assert found.exit_code == "1:0"
    assert run.saved == run.steps()[-1]
    assert "submit it again to continue from the newest checkpoint" in run.output
    check_no_traces(run.output)


def test_it_is_cancelled(cluster: Slurm, config: Path, tmp_path: Path, system: Scheduler) -> None:
    run = Run(cluster, config, tmp_path, "train.steps=100000", system=system)
    run.wait_for_step(60)
    began = time.monotonic()
    cluster.run("scancel" if system == "slurm" else "qdel", str(run.number))
    assert run.end("CANCELLED", seconds=90).state == "CANCELLED"
    assert time.monotonic() - began < MOST_SECONDS_WITHOUT_RANKS
    assert run.saved == run.steps()[-1]
    check_no_traces(run.output)


def test_the_host_of_the_batch_script_is_lost(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    """The nodes that are left requeue the job, which starts again without the lost node and finishes."""
    run = Run(cluster, config, tmp_path, "train.steps=1500", spares=1)
    run.wait_for_step(60)
    lost = cluster.job(run.number).host
    cluster.lose(lost)
    try:
        found = run.end("COMPLETED", seconds=400)
    finally:
        cluster.start_node(lost)
    assert (found.exit_code, found.restarts) == ("0:0", 1)
    assert lost not in found.nodes
    assert run.saved == 1500
    assert "the host of the batch script is lost" in str(EventLog(run.folder).read())


@pytest.mark.parametrize("words", [["-N1", "-n2"], ["-N2", "-n2"], ["-n2", "--mpi=pmi2"]], ids=" ".join)
def test_tasks_of_srun_are_ranks(cluster: Slurm, config: Path, tmp_path: Path, words: list[str]) -> None:
    """A training that `srun` starts has the losses of `--ranks 2`."""
    train = ["optimus", "train", str(config), "train.steps=5"]
    environment = ["env", "MASTER_ADDR=127.0.0.1"] if "-N2" in words else []  # nodes of this Slurm have no names
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for command in (
        [*train, f"train.output={ours}", "--ranks", "2"],
        [*environment, "srun", *words, *train, f"train.output={theirs}"],
    ):
        done = cluster.run(*command)
        assert done.returncode == 0, done.stderr
    assert losses(theirs) == losses(ours)


def losses(run: Path) -> list[Any]:
    return [row["loss"] for row in read_json_lines(run / "metrics.jsonl")]


def test_tasks_on_nodes_without_a_name_are_refused(cluster: Slurm, config: Path, tmp_path: Path) -> None:
    srun = ["srun", "-N2", "-n2", "--kill-on-bad-exit"]
    done = cluster.run(*srun, "optimus", "train", str(config), f"train.output={tmp_path}/run")
    assert done.returncode == 2
    assert done.stderr.count("set MASTER_ADDR") == 1
    assert not (tmp_path / "run").exists()
