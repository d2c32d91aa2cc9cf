"""A Slurm of four nodes on this machine: munge, slurmctld, and one slurmd per node (Debian's `slurm-wlm`).

With its programs for users of PBS (Debian's `slurm-wlm-torque`) and MPICH's `mpiexec`, it also runs scripts for PBS, of
which no free version is packaged.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NODES = ("n0", "n1", "n2", "n3")
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scancel", "scontrol")

_CONF = """
ClusterName=optimus
SlurmctldHost=localhost
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=1
SlurmdTimeout=20
KillWait=60
UnkillableStepTimeout=120
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
"""

PBS_PROGRAMS = ("qsub", "qdel", "generate_pbs_nodefile", "mpiexec.mpich")
# What PBS tells a batch script. A bash script reads this file first.
_PBS_ENV = """
if [ -n "${SLURM_JOB_ID-}" ] && [ -z "${PBS_JOBID-}" ]; then
    export PBS_JOBID=$SLURM_JOB_ID.server PBS_NODEFILE=$(SLURM_NODELIST=$SLURM_JOB_NODELIST generate_pbs_nodefile)
fi
"""
# MPICH gives the tasks the name of the first node, and PBS has no name of the node in the environment at all.
_MPIEXEC = """#!/bin/bash
exec mpiexec.mpich "${@:1:6}" "$(dirname "$0")/task" "${@:7}"
"""
_TASK = """#!/bin/bash
export SLURMD_NODENAME=$(tr '\\0' '\\n' <"/proc/$PPID/environ" | sed -n 's/^SLURMD_NODENAME=//p')
exec "$@"
"""


def missing_for_pbs() -> str:
    """Returns the reason why this machine's Slurm cannot run scripts for PBS, or an empty string."""
    absent = [program for program in PBS_PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)} not installed (Debian: apt-get install slurm-wlm-torque mpich)" if absent else ""


def missing() -> str:
    """Returns the reason why this machine cannot run Slurm, or an empty string."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "needs root"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Job:
    """The state of a job as `scontrol` shows it."""

    state: str
    exit_code: str
    host: str  # node of the batch script
    nodes: list[str]
    restarts: int


@dataclass
class Slurm:
    """A running Slurm, and the environment of its commands."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, env=self.environment, cwd=self.folder, timeout=timeout
        )

    def submit(self, script: Path, *options: str) -> int:
        """Submits a batch script, and returns the number of the job."""
        done = self.run(
            "sbatch", "--parsable", f"--output={self.folder}/job-%j.out", "--open-mode=append", *options, str(script)
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def submit_to_pbs(self, script: Path) -> int:
        """Submits a batch script for PBS, and returns the number of the job."""
        programs = self.folder / "pbs"
        if not programs.exists():
            programs.mkdir()
            (programs / "env").write_text(_PBS_ENV)
            for name, text in (("mpiexec", _MPIEXEC), ("task", _TASK)):
                (programs / name).write_text(text)
                (programs / name).chmod(0o755)
        # Slurm ignores `-W tolerate_node_failures=all`, and runs one `mpiexec` at a time.
        more = {"BASH_ENV": str(programs / "env"), "SBATCH_NO_KILL": "set", "SLURM_OVERLAP": "1"}
        path = f"{programs}:{self.environment['PATH']}"
        output = f"{self.folder}/job-%j.out"
        done = subprocess.run(
            ["qsub", "-o", output, "-j", "oe", str(script)],
            capture_output=True,
            text=True,
            env=self.environment | more | {"PATH": path},
            cwd=self.folder,
        )
        assert done.stdout.strip().isdigit(), done.stdout + done.stderr
        return int(done.stdout)

    def output(self, job: int) -> str:
        path = self.folder / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: int) -> Job:
        shown = self.run("scontrol", "-o", "show", "job", str(job)).stdout

        def field(name: str) -> str:
            match = re.search(rf"\b{name}=(\S*)", shown)
            return match[1] if match else ""

        nodes = self.run("scontrol", "show", "hostnames", field("NodeList")).stdout.split()
        return Job(field("JobState"), field("ExitCode"), field("BatchHost"), nodes, int(field("Restarts") or 0))

    def wait_for(self, job: int, *states: str, seconds: float) -> Job:
        """Waits until the job has one of these states. Fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while (found := self.job(job)).state not in states:
            assert time.monotonic() < deadline, f"{found}\n{self.output(job)}"
            time.sleep(0.5)
        return found

    def processes(self, node: str) -> list[int]:
        """Returns the processes of jobs on a node."""
        mark = f"\0SLURMD_NODENAME={node}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in b"\0" + path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def lose(self, node: str) -> None:
        """Loses a node as by a power failure: its daemon and all its processes are gone at once."""
        daemons = subprocess.run(
            ["pgrep", "-f", rf"slurmd -N {node}$|slurmstepd"], capture_output=True, text=True
        ).stdout.split()
        here = [int(pid) for pid in daemons if self._belongs(int(pid), node)]
        for pid in [*here, *self.processes(node)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _belongs(self, pid: int, node: str) -> bool:
        """Returns whether a daemon serves `node`: a `slurmstepd` has its step's socket in the folder of its node."""
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"-N" in words:
                return node.encode() in words
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            return any(f"spool-{node}" in link or f"slurmd-{node}.log" in link for link in links)
        return False

    def start_node(self, node: str) -> None:
        done = self.run("slurmd", "-N", node)
        assert done.returncode == 0, done.stderr


@contextmanager
def slurm(folder: Path, port: int = 26817) -> Iterator[Slurm]:
    """Starts a Slurm with four nodes of two processors, and ends it and all its processes at the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port + 1 + number} CPUs=2"
        for number, name in enumerate(NODES)
    )
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(folder=folder, port=port) + nodes + "\nPartitionName=all Nodes=ALL Default=YES State=UP\n"
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": _path()}
    running = Slurm(folder, environment)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    done = running.run("munged", f"--socket={folder}/munge.socket", *files, "--force")
    assert done.returncode == 0, done.stderr
    try:
        done = running.run("slurmctld")
        assert done.returncode == 0, done.stderr
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            running.start_node(node)
        deadline = time.monotonic() + 60
        while "idle" not in running.run("sinfo", "-h", "-t", "idle", "-N").stdout:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.2)
        yield running
    finally:
        running.run("scancel", "--full", "--state=RUNNING")
        for node in NODES:
            running.lose(node)
        for pid in ("slurmctld", "munge"):
            with suppress(OSError, ValueError):
                os.kill(int((folder / f"{pid}.pid").read_text()), signal.SIGKILL)
