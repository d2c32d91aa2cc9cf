"""Batch scripts in a dry run: stand-in programs, first on PATH, record their calls and simulate the nodes of a job."""

import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimus import cli
from optimus.errors import UserError
from optimus.resilience.scheduler import BatchJob, Scheduler, script, write_script

SCHEDULERS: list[Scheduler] = ["slurm", "pbs"]
NODES = ["n1", "n2", "n3", "n4"]  # 2 nodes that train and 2 spares

# Files of the folder `$PLAY`: `play` is the script of an agent, `dead` has silent nodes, `launches` the recorded calls.
PROGRAMS = {
    "optimus": """
        if [ "$1" = rendezvous ]; then
            echo "$@" >>"$PLAY/stores"
            [ ! -e "$PLAY/taken-$3" ] || exit 2
            echo $$ >"$PLAY/store"
            echo listening
            exec sleep 300
        fi
        line=$(printf '%q ' "$@")
        echo "$line" >>"$PLAY/launches" # at once: other nodes write there too
        while [ $# -gt 0 ]; do
            case $1 in --node) node=$2 ;; --name) name=$2 ;; esac
            shift
        done
        attempt=${name#*-} finished='{"time": 1.0, "kind": "finished", "node": "n1"}'
        . "$PLAY/play"
    """,
    "srun": """
        line=$(printf '%q ' "$@")
        echo "$line" >>"$PLAY/launchers"
        out=" $(cat "$PLAY/dead" 2>/dev/null) " chosen=
        while [[ $1 == --* ]]; do
            case $1 in
                --exclude=*) excluded=${1#*=}; out+="${excluded//,/ } " ;;
                --nodelist=*) chosen=${1#*=} ;;
            esac
            shift
        done
        [ -z "$chosen" ] || [[ $out != *" $chosen "* ]] || exit 1
        for node in ${chosen:-n1 n2 n3 n4}; do
            [[ $out == *" $node "* ]] || SLURMD_NODENAME=$node "$@" &
        done
        wait
    """,
    "mpiexec": """
        line=$(printf '%q ' "$@")
        echo "$line" >>"$PLAY/launchers"
        hosts=$(cat "$6")
        shift 6
        [[ " $(cat "$PLAY/dead" 2>/dev/null) " != *" $hosts "* ]] || exit 1
        for node in $hosts; do HOST=$node "$@" & done
        wait
    """,
    "hostname": """
        [ "${1-}" != -I ] || { echo '127.0.1.1 fe80::1 10.0.0.7 '; exit; }
        echo "${HOST:-head}.cluster"
    """,
    "getent": "echo '127.0.1.1 STREAM head'",
    "scontrol": """
        [ "$*" = "show hostnames n[1-4]" ] || exit 1
        printf '%s\\n' n1 n2 n3 n4
    """,
    "sbatch": """SLURM_JOB_ID=4711 SLURM_JOB_NODELIST='n[1-4]' exec bash "$1" """,
    "qsub": """
        printf '%s\\n' n1.cluster n1.cluster n2.cluster n3.cluster n4.cluster >"$PLAY/nodefile"
        PBS_JOBID=4711.server PBS_NODEFILE=$PLAY/nodefile exec bash "$1"
    """,
}
FINISH = 'echo "$finished" >>"$RUN/events.jsonl"\n'


@dataclass
class Stage:
    """The environment of a simulated job. All paths have blanks and quotes."""

    job: BatchJob
    path: Path  # the batch script
    play: Path
    environment: dict[str, str]

    def command(self, play: str) -> str:
        """Writes a batch script whose agents run `play` ($attempt, $node, $RUN), and returns the command that submits
        it."""
        (self.play / "play").write_text(play)
        return write_script(self.job, self.path)

    def submit(self, play: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(play), shell=True, capture_output=True, text=True, env=self.environment, timeout=300
        )

    def launches(self) -> dict[str, list[dict[str, str]]]:
        """Returns the calls of agents by the name of the launch: `words` before the options, and each option."""
        found: dict[str, list[dict[str, str]]] = {}
        for line in (self.play / "launches").read_text().splitlines():
            before, *_ = line.split(" --", 1)
            words = shlex.split(line)[len(shlex.split(before)) :]
            options = dict(zip(words[::2], words[1::2]))
            found.setdefault(options["--name"], []).append({"words": before, **options})
        return found

    def launchers(self) -> list[str]:
        return (self.play / "launchers").read_text().splitlines()


@pytest.fixture(params=SCHEDULERS)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    home = tmp_path / "it's a home"
    programs, play, run = home / "bin", home / "play", home / "a $run"
    for folder in (programs, play, run):
        folder.mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o755)
    command = ["optimus", "launch", "my config.yaml", "data.path=/d/a b", "--nodes", "2", "--ranks-per-node", "8"]
    job = BatchJob(request.param, command, run, home, programs, nodes=2, spares=2)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PLAY": str(play), "RUN": str(run)}
    return Stage(job, home / "my job.sh", play, environment)


def names(launch: list[dict[str, str]]) -> list[str]:
    return sorted(agent["--node"] for agent in launch)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("checker", [("bash", "-n"), ("shellcheck", "-s", "bash")])
def test_the_shell_has_nothing_against_it(scheduler: Scheduler, checker: tuple[str, ...], tmp_path: Path) -> None:
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # programs of the virtual environment
    program = shutil.which(checker[0], path=beside)
    if program is None:
        pytest.skip(f"{checker[0]} is not installed")
    path = tmp_path / "job.sh"
    write_script(BatchJob(scheduler, ["optimus"], tmp_path / "a 'b", tmp_path, tmp_path, nodes=2, spares=1), path)
    done = subprocess.run([program, *checker[1:], str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("@[A-Z]+@", path.read_text())
    assert os.access(path, os.X_OK)


def test_success_at_once(stage: Stage) -> None:
    """Each node has one agent, spares included, and the store is on the head node; no process is left behind."""
    done = stage.submit('[ "$node" != n1 ] || ' + FINISH)
    assert (done.returncode, done.stderr) == (0, "")
    assert "finished" in done.stdout
    launches = stage.launches()
    assert list(launches) == ["4711-1"]
    assert names(launches["4711-1"]) == NODES
    for agent in launches["4711-1"]:
        assert shlex.split(agent["words"]) == ["launch", "my config.yaml", "data.path=/d/a b"]
        assert {"--nodes": "2", "--spares": "2", "--ranks-per-node": "8"}.items() <= agent.items()
        assert agent["--rendezvous"] == "10.0.0.7:24711"
    (launcher,) = stage.launchers()
    assert re.match(r"(--nodes=4 --ntasks=4 --ntasks-per-node=1 --kill-on-bad-exit=0 |-n 4 --ppn 1 )", launcher)
    assert [path.name for path in stage.job.run.iterdir()] == ["events.jsonl"]
    assert not running(stage)


def test_a_bad_node_is_left_out_of_the_next_attempt(stage: Stage) -> None:
    """The agents of the first attempt fail and exclude a node.

    An older run's end is in the event log, and another node is excluded already.
    """
    (stage.job.run / "events.jsonl").write_text('{"time": 0.5, "kind": "finished", "node": "n1"}\n')
    (stage.job.run / "excluded.txt").write_text("elsewhere\n")
    done = stage.submit(f"""
        if [ "$attempt" = 1 ]; then [ "$node" != n2 ] || echo n2 >>"$RUN/excluded.txt"; exit 1; fi
        [ "$node" != n1 ] || {FINISH}
        [ "$node" != n3 ] || exit 1 # its node was excluded, and yet the run goes on
    """)
    assert (done.returncode, done.stderr) == (0, "")
    launches = stage.launches()
    assert list(launches) == ["4711-1", "4711-2"]
    assert names(launches["4711-1"]) == NODES
    assert names(launches["4711-2"]) == ["n1", "n3", "n4"]
    assert {agent["--spares"] for agent in launches["4711-2"]} == {"1"}
    assert len(stage.launchers()) == 2  # every node has left its exit code, so no node is asked whether it is alive
    if stage.job.scheduler == "slurm":
        assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --exclude=n2 " in stage.launchers()[1]
    assert "without n2" in done.stdout


def test_a_node_that_dies_with_its_launcher_is_left_out(stage: Stage) -> None:
    """The launcher kills its job as a node dies; nodes without an exit code take part again if they answer."""
    done = stage.submit(f"""
        if [ "$attempt" = 1 ]; then
            if [ "$node" = n1 ]; then exit 1; fi
            echo n3 n3.cluster >"$PLAY/dead"
            kill -KILL "$PPID"
            exit 1
        fi
        [ "$node" != n1 ] || {FINISH}
    """)
    assert done.returncode == 0, done.stderr
    assert names(stage.launches()["4711-2"]) == ["n1", "n2", "n4"]
    asked = [line for line in stage.launchers() if line.endswith("true ")]
    assert len(asked) == 3  # all but n1
    assert not running(stage)  # no watcher of an agent remains either


@pytest.mark.parametrize("play", ["exit 2", '[ "$node" = n1 ] || exit 0; exit 2'], ids=["all", "one, others let go"])
def test_bad_input_is_not_tried_again(stage: Stage, play: str) -> None:
    done = stage.submit(play)
    assert done.returncode == 2
    assert "cannot continue with this configuration" in done.stdout
    assert list(stage.launches()) == ["4711-1"]


@pytest.mark.in_turn(1, 3)
@pytest.mark.parametrize("crash", ["exit 1", 'kill -KILL "$PPID"'], ids=["agent", "node"])
def test_a_crash_beside_bad_input_is_tried_again(stage: Stage, crash: str) -> None:
    done = stage.submit(f'[ "$attempt" = 1 ] || {FINISH} [ "$node" = n1 ] || exit 2; {crash}')
    assert done.returncode == 0
    assert list(stage.launches()) == ["4711-1", "4711-2"]


def test_too_few_nodes(stage: Stage) -> None:
    done = stage.submit('[ "$node" = n4 ] || echo "$node" >>"$RUN/excluded.txt"; exit 1')
    assert done.returncode == 1
    assert list(stage.launches()) == ["4711-1"]
    assert "1 of 4 nodes are left and 2 are needed (out: n1" in done.stdout
    assert "events.jsonl" in done.stdout
    assert not running(stage)


@pytest.mark.in_turn(0, 2)
def test_attempts_are_used_up(stage: Stage) -> None:
    done = stage.submit("exit 1")
    assert done.returncode == 1
    assert list(stage.launches()) == [f"4711-{attempt}" for attempt in range(1, 11)]
    assert "all 10 attempts are used up" in done.stdout


@pytest.mark.in_turn(0, 3)
def test_a_store_that_dies_or_finds_its_port_taken_is_started_again(stage: Stage) -> None:
    (stage.play / "taken-24711").touch()
    done = stage.submit(f"""
        [ "$attempt" = 1 ] || {FINISH}
        [ "$node" != n1 ] || kill -KILL "$(cat "$PLAY/store")"
        exit 1
    """)
    assert done.returncode == 0, done.stderr
    assert [shlex.split(line) for line in (stage.play / "stores").read_text().splitlines()] == [
        ["rendezvous", "--port", port, "--address", "10.0.0.7"] for port in ("24711", "25720") * 2
    ]
    assert stage.launches()["4711-1"][0]["--rendezvous"] == "10.0.0.7:25720"


def test_the_warning_reaches_the_agents(stage: Stage) -> None:
    """A signal to the script reaches every agent as SIGTERM with time to save, and ends the attempts."""
    command = stage.command("""
        trap 'sleep 0.3; echo "$node" >>"$PLAY/saved"; exit 1' TERM
        echo "$node" >>"$PLAY/ready"
        while :; do sleep 0.1; done
    """)
    job = subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=subprocess.PIPE, text=True, env=stage.environment)
    ready = stage.play / "ready"
    deadline = time.monotonic() + 300
    while not ready.exists() or len(ready.read_text().split()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 1
    assert "submit it again" in out
    assert sorted((stage.play / "saved").read_text().split()) == NODES
    assert list(stage.launches()) == ["4711-1"]
    assert not running(stage)


@pytest.mark.in_turn(2, 3)
def test_the_host_shows_that_it_lives_while_nodes_save(stage: Stage) -> None:
    """`scancel` signals all processes of a job, but nodes that have saved must not take its host for lost."""
    command = stage.command("""
        beat() { cat "$RUN"/.job-4711-*/alive; }
        trap 'before=$(beat); sleep 3; [ "$(beat)" = "$before" ] || echo "$node" >>"$PLAY/alive"; exit 1' TERM
        echo "$node" >>"$PLAY/ready"
        while :; do sleep 0.1; done
    """)
    words = ["bash", "-c", f"exec {command}"]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=stage.environment, start_new_session=True)
    ready = stage.play / "ready"
    deadline = time.monotonic() + 300
    while not ready.exists() or len(ready.read_text().split()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGTERM)
    out, _ = job.communicate(timeout=300)
    assert "submit it again" in out
    assert sorted((stage.play / "alive").read_text().split()) == NODES
    assert not running(stage)


def test_a_node_does_not_wait_for_a_host_that_has_finished(stage: Stage) -> None:
    """The script removes its folder as soon as all nodes have left their codes, perhaps before a node looks into it."""
    began = time.monotonic()
    done = stage.submit(f'[ "$node" != n1 ] || {FINISH} [ "$node" = n1 ] || sleep 1; rm -rf "$RUN"/.job-4711-*')
    assert "the run has finished" in done.stdout
    assert time.monotonic() - began < 20


def test_pbs_warns_by_a_clock_and_slurm_by_itself(stage: Stage) -> None:
    text = script(replace(stage.job, time="1:00:30"), "submit")
    if stage.job.scheduler == "pbs":
        assert "sleep 3510 &" in text
    else:
        assert "#SBATCH --signal=B:TERM@120\n" in text
        assert "timer=$!" not in text


def test_directives(stage: Stage) -> None:
    """Directives ask for nodes and spares, and those of the user replace the defaults."""
    slurm = stage.job.scheduler == "slurm"
    given = ["-l select=4:ncpus=64", "-A physics", "-l min_walltime=1:00:00"]
    if slurm:
        given = ["--exclusive=user", "--account=physics", "--time-min=1:00:00"]
    lines = script(replace(stage.job, time="24:00:00", directives=given), "submit").splitlines()
    head = "#SBATCH" if slurm else "#PBS"
    found = [line.removeprefix(head).strip() for line in lines if line.startswith(f"{head} ")]
    assert set(given) <= set(found)
    if slurm:
        assert {"--job-name=o-a-run", "--nodes=4", "--ntasks-per-node=1", "--time=24:00:00", "--no-kill"} <= set(found)
        assert "--exclusive" not in found
    else:
        assert {"-N o-a-run", "-l walltime=24:00:00", "-W tolerate_node_failures=all", "-S /bin/bash"} <= set(found)
        assert "-l select=4" not in found
        assert "-l select=4" in script(stage.job, "submit")


@pytest.mark.parametrize(
    ("scheduler", "given", "replaced"),
    [
        ("slurm", ["--nodes 4", "--job-name x"], ["--nodes=4", "--job-name=o-a-run"]),
        ("slurm", ["-N 4", "-J x"], ["--nodes=4", "--job-name=o-a-run"]),
        ("slurm", ["-N4 -Jx --exclusive=user"], ["--nodes=4", "--job-name=o-a-run", "--exclusive"]),
        ("pbs", ["-N x", "-S /bin/sh"], ["-N o-a-run", "-S /bin/bash"]),
        ("pbs", ["-lselect=4:ncpus=64,place=pack -j n"], ["-l select=4", "-l place=scatter:excl", "-j oe"]),
        ("pbs", ["-W group_list=physics"], []),
    ],
)
def test_options_of_any_spelling_are_replaced(
    scheduler: Scheduler, given: list[str], replaced: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    job = BatchJob(scheduler, ["optimus"], run, tmp_path, tmp_path, nodes=3, spares=1)
    usual, found = (
        {line for line in script(each, "submit").splitlines() if line.startswith(("#SBATCH ", "#PBS "))}
        for each in (job, replace(job, directives=given))
    )
    assert {line.split(" ", 1)[1] for line in usual - found} == set(replaced)
    assert {line.split(" ", 1)[1] for line in found - usual} == set(given)


def test_a_script_that_cannot_be_made_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", fail)
    job = BatchJob("pbs", ["optimus"], tmp_path, tmp_path, tmp_path, nodes=2, spares=1)
    with pytest.raises(UserError, match=r"cannot write .*job\.sh: Operation not permitted"):
        write_script(job, tmp_path / "job.sh")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": "90"}, "--time 90: give HOURS:MINUTES:SECONDS"),
        ({"time": "0:04:00"}, "--time 0:04:00: give more than 240 s"),
        ({"directives": ["#SBATCH -A x"]}, "without #SBATCH"),
        ({"directives": ["-A x\nrm -rf ."]}, "one line"),
        ({"directives": ["-A x\rrm -rf ."]}, "one line"),
        ({"directives": ["--time=1:00:00"]}, "give --time instead"),
        ({"directives": ["-t1:00:00"]}, "give --time instead"),
        ({"directives": ["--mem=0 --time 1:00:00"]}, "give --time instead"),
        ({"directives": ["-l walltime=1:00:00"]}, "give --time instead"),
        ({"directives": ["--nodes=2"]}, "--directive '--nodes=2': the job has 2 nodes and 1 spare: change --nodes"),
        ({"directives": ["-A x -N2-4"]}, "the job has 2 nodes and 1 spare"),
        ({"directives": ["-l select=2,walltime=1:00:00"]}, "give --time instead"),
        ({"directives": ["-l select=2 -lwalltime=1:00:00"]}, "give --time instead"),
    ],
)
def test_bad_jobs(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    job = BatchJob("slurm", ["optimus"], tmp_path, tmp_path, tmp_path, nodes=2, spares=1)
    with pytest.raises(UserError) as found:
        write_script(replace(job, **changes), tmp_path / "job.sh")
    assert message in str(found.value)
    assert not (tmp_path / "job.sh").exists()


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    job = BatchJob("pbs", ["optimus"], tmp_path, tmp_path, tmp_path, nodes=2, spares=1)
    path = tmp_path / "job.sh"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        write_script(job, path)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match="cannot write"):
        write_script(job, tmp_path / "none" / "job.sh")


def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["optimus", "launch", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    code = end.value.code
    printed = capsys.readouterr()
    return (code if isinstance(code, int) else 0), printed.out, printed.err


def test_the_command_line(
    small_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder is that of the configuration, relative to this folder, and launch options go into the script."""
    monkeypatch.chdir(tmp_path)
    Path("a run.yaml").write_text(yaml.dump(small_run))
    words = ("a run.yaml", "train.output=my runs/x", "--nodes", 2, "--spares", 1, "--keep-alive", "2x4",
             "--scheduler", "slurm", "--output", "my job.sh", "--directive", "--mem=0")  # fmt: skip
    code, out, _ = command_line(monkeypatch, capsys, *words)
    assert code == 0
    assert out == "my job.sh: 2 nodes and 1 spare; submit it with: sbatch 'my job.sh'\n"
    text = Path("my job.sh").read_text()
    assert f"run='{tmp_path}/my runs/x'\n" in text
    assert f"cd -- {shlex.quote(str(tmp_path))} ||" in text
    (line,) = [line for line in text.splitlines() if line.startswith("command=(")]
    assert shlex.split(line.removeprefix("command=(").removesuffix(")")) == [
        "optimus", "launch", "a run.yaml", "train.output=my runs/x", "--nodes", "2", "--ranks-per-node", "1",
        "--keep-alive", "2x4", "--wait", "600", "--rejoin-wait", "35", "--max-restarts", "5",
    ]  # fmt: skip
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --mem=0\n" in text
    assert not Path("my runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheduler", "slurm"], "--scheduler needs --output PATH for the file to write"),
        (["--output", "job.sh"], "--output: it needs --scheduler"),
        (["--time", "1:00:00"], "--time: it needs --scheduler"),
        (["--scheduler", "pbs", "--output", "job.sh", "--node", "n1"], "--node: leave it out with --scheduler"),
        (["--scheduler", "pbs", "--output", "job.sh", "--spares", "-1"], "--spares -1"),
        (["--scheduler", "pbs", "--output", "job.sh", "--nodes", "0"], "--nodes 0"),
        (["--scheduler", "pbs", "--output", "job.sh", "--nodes", "7"], "train.global_batch"),
        (
            ["--scheduler", "slurm", "--output", "job.sh", "--wait", "nan"],
            "--wait nan: give a finite number of seconds",
        ),
        (["--scheduler", "slurm", "--output", "job.sh", "--wait", "-5"], "--wait -5: give a finite number of seconds"),
        (["--rejoin-wait", "-1"], "--rejoin-wait -1: give a finite number of seconds"),
    ],
)
def test_bad_options(
    words: list[str],
    message: str,
    small_run: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.dump(small_run))
    code, _, err = command_line(monkeypatch, capsys, "run.yaml", *words)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("job.sh").exists()


def running(stage: Stage) -> list[str]:
    """Returns the programs that outlive the script; signals have some time to arrive."""
    deadline = time.monotonic() + 120
    while (found := _running(stage)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _running(stage: Stage) -> list[str]:
    """Returns the processes whose PLAY is that of this stage."""
    marker = f"PLAY={stage.play}".encode()
    found = []
    for process in Path("/proc").iterdir() if Path("/proc").is_dir() else []:
        try:
            if process.name.isdigit() and marker in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [command] if command and command != "sleep 2 " else []  # a watcher's sleep
        except OSError:
            continue
    return found
