"""Launchers of others: a task's place by each launcher's variables, and runs under torchrun and Open MPI."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimus.disk import read_json_lines
from optimus.errors import UserError
from optimus.launch import launchers

PROGRAMS = Path(sys.executable).parent


def named(prefix: str, *values: int) -> dict[str, str]:
    return dict(zip(PREFIXES[prefix], map(str, values), strict=True))


PREFIXES = {
    "OMPI": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MV2": [f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "PALS": ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"],
    "PMI": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    "SLURM": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
}


@pytest.mark.parametrize("launcher", PREFIXES)
def test_the_place_of_a_task(launcher: str) -> None:
    expected = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert launchers.rank_variables(named(launcher, 5, 8, 1, 4)) == expected
    assert launchers.rank_variables(named(launcher, 0, 1, 0, 1)) == {}  # a single task starts its own ranks
    taken = named(launcher, 5, 8, 1, 4) | TORCHRUN
    assert launchers.rank_variables(taken) == {}  # torchrun under another launcher


LOCAL = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | LOCAL


def test_mpiexec_inside_a_slurm_job() -> None:
    """Open MPI starts its helpers with `srun`, whose variables its tasks inherit."""
    env = named("SLURM", 1, 2, 0, 1) | named("OMPI", 3, 4, 1, 2)
    assert launchers.rank_variables(env)["RANK"] == "3"


def test_a_batch_script_and_a_shell_are_no_tasks() -> None:
    assert launchers.rank_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}) == {}
    assert launchers.rank_variables({}) == {}


def test_the_tasks_of_slurms_nodes() -> None:
    env = named("SLURM", 5, 8, 1, 4)
    assert launchers.rank_variables(env | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"})["LOCAL_WORLD_SIZE"] == "4"
    with pytest.raises(UserError, match=r"Slurm has started 4\(x2\),3 tasks on the nodes: start equally many"):
        launchers.rank_variables(env | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (named("SLURM", 1, 4, 0, 2), "rank 1 of 4 as task 0 of 2 on its node: ranks must be numbered node by node"),
        (named("OMPI", 1, 3, 1, 2), "Open MPI has started rank 1 of 3 as task 1 of 2"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1: a launcher has started this process as one of several tasks, but does not"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1: .* Set RANK, WORLD_SIZE, LOCAL_RANK, .* or unset PMI_RANK"),
        (LOCAL | {"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT are not set"),
        (LOCAL | {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "but RANK is not set"),
        (TORCHRUN | {"MASTER_PORT": ""}, "but MASTER_PORT is not set"),
        (TORCHRUN | {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, "but LOCAL_RANK and LOCAL_WORLD_SIZE are not set"),
        *(({"WORLD_SIZE": text}, f"WORLD_SIZE is {text}|WORLD_SIZE is '{text}'") for text in ("", "two", "0", "-1")),
        (TORCHRUN | {"RANK": "5"}, "RANK is '5', but must be a number of at least 0 below 2: correct it, or unset"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', but must be a number"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is '70000', but must be a number of at least 0 below 65536"),
        (named("OMPI", 3, 2, 1, 2), "Open MPI has started rank 3 of 2"),
        (named("OMPI", 0, 2, 0, 0), "as task 0 of 0 on its node"),
        (named("OMPI", 0, 0, 0, 1), "Open MPI has started rank 0 of 0"),
        (
            named("OMPI", 0, 2, 0, 2) | {"OMPI_COMM_WORLD_LOCAL_RANK": ""},
            "OMPI_COMM_WORLD_LOCAL_RANK is '', which is no",
        ),
        (named("OMPI", 0, 2, 0, 2) | {"WORLD_SIZE": "1"}, "WORLD_SIZE is 1, but Open MPI has started 2 tasks: unset"),
    ],
)
def test_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        launchers.rank_variables(env)


def test_where_ranks_meet(tmp_path: Path) -> None:
    here, there = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    found = launchers.master_of(here, tmp_path)
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert 20_000 <= int(found["MASTER_PORT"]) < 32_000
    assert launchers.master_of(here, tmp_path) == found
    ports = {launchers.master_of(here, tmp_path / str(n))["MASTER_PORT"] for n in range(50)}
    assert len(ports) > 45  # other runs meet elsewhere
    assert launchers.master_of(there | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, tmp_path) == {}
    assert launchers.master_of(there | {"MASTER_ADDR": "a"}, tmp_path) == {"MASTER_PORT": found["MASTER_PORT"]}
    assert launchers.master_of(there | {"SLURM_STEP_NODELIST": "localhost"}, tmp_path)["MASTER_ADDR"] == "localhost"
    with pytest.raises(UserError, match=r"no place where they meet \(their launcher names none\): set MASTER_ADDR to"):
        launchers.master_of(there, tmp_path)
    with pytest.raises(UserError, match=r"this machine does not know the name no-such-node07\)"):
        launchers.master_of(there | {"SLURM_STEP_NODELIST": "no-such-node[07-09]"}, tmp_path)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("a[03-05,9],b1", "a03"),
        ("x1000c0s[0-3]b0n0", "x1000c0s0b0n0"),
        ("login-2,c[1-2]", "login-2"),
        ("c[7,9]", "c7"),
        ("rack[0-1]node[00-15]", "rack0node00"),
        ("x[2,4]c[1-3,7]b0,y1", "x2c1b0"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert launchers.first_node(nodes) == first


def test_a_node_starts_its_ranks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in named("SLURM", 1, 2, 1, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="several tasks of `optimus launch` on this node: start one per node"):
        launchers.check_alone("optimus launch")


@pytest.mark.parametrize("text", ["2", "abc"])
def test_a_variable_that_an_earlier_program_has_left_is_no_launcher(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    launchers.check_alone("optimus launch")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match=f"LOCAL_WORLD_SIZE is '{text}', but must be a number of at least 1 below 2"):
        launchers.check_alone("optimus launch")


def test_another_number_of_ranks_than_the_launchers(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import optimus

    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=r"`ranks` is 3, but a launcher has started 2 ranks \(WORLD_SIZE\): leave `ranks`"
    ):
        optimus.train(small_run, ranks=3)
    with pytest.raises(UserError, match='`ranks` is 0: give a number of at least 1, or "auto"'):
        optimus.train(small_run, ranks=0)


def test_a_rank_that_an_earlier_program_has_left_is_ignored(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without WORLD_SIZE, a variable RANK does not keep a run from checking that its folder is free."""
    import optimus

    optimus.train(small_run)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(UserError, match="already holds a run"):
        optimus.train(small_run)


@pytest.mark.in_turn(2, 3)
def test_a_process_trains_once_under_a_launcher(small_run: dict[str, Any], tmp_path: Path) -> None:
    """A second training in the same tasks would wait for the store of the first."""
    script = tmp_path / "twice.py"
    script.write_text(
        "import sys, json, optimus\n"
        "config = json.loads(sys.argv[1])\n"
        "optimus.train(config)\n"
        "try:\n    optimus.train(config, resume=True)\n"
        "except optimus.UserError as error:\n    print(error)\n"
    )
    torchrun = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(script), json.dumps(small_run)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("this process has trained under its launcher already") == 2


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_json_lines(run / "metrics.jsonl")]


@pytest.mark.in_turn(2, 3)
def test_runs_under_other_launchers_have_the_losses_of_our_ranks(small_run: dict[str, Any], tmp_path: Path) -> None:
    config, runs = tmp_path / "run.yaml", {}
    config.write_text(yaml.safe_dump(small_run))
    mpiexec = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    torchrun = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m"]
    starts = {
        "ours": [sys.executable, "-m", "optimus", "train", str(config), "--ranks", "2"],
        "torchrun": [*torchrun, "optimus", "train", str(config)],
        "mpiexec": [*mpiexec, sys.executable, "-m", "optimus", "train", str(config)],
    }
    if not has_open_mpi():
        del starts["mpiexec"]  # Debian: apt-get install openmpi-bin
    for name, words in starts.items():
        output = tmp_path / name
        done = subprocess.run(
            [*words, f"train.output={output}", "observe.report=false"], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("checkpoint ") == 1  # only the first rank prints the result
        runs[name] = losses(output)
    assert len(runs["ours"]) == 6
    assert all(found == runs["ours"] for found in runs.values())


@pytest.mark.in_turn(1, 3)
@pytest.mark.parametrize(
    ("wrong", "about"),
    [("train.stepz=1", "stepz"), ("data.path=absent", "absent is not"), ("parallel.tensor=3", "parallel.tensor")],
)
@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_one_rank_prints_an_error_that_all_have(
    small_run: dict[str, Any], tmp_path: Path, launcher: str, wrong: str, about: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_run))
    starts = {
        "torchrun": [str(PROGRAMS / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m"],
        "mpiexec": ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m"],
    }
    if launcher == "mpiexec" and not has_open_mpi():
        pytest.skip("Open MPI is not installed (Debian: apt-get install openmpi-bin)")
    words = [*starts[launcher], "optimus", "train", str(config), wrong]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    code = 2 if launcher == "mpiexec" else 1  # torchrun has one code for all errors
    assert done.returncode == code, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert about in said[0]


@pytest.mark.parametrize(("rank", "joined", "delays"), [("0", False, 0), ("1", False, 1), ("1", True, 0)])
def test_an_error_of_one_rank_is_printed_too(
    rank: str, joined: bool, delays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(launchers.time, "sleep", waited.append)
    monkeypatch.setattr(launchers.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv(launchers.TRAINED, str(os.getpid() if joined else 0))
    with pytest.raises(UserError, match="this rank's own"), launchers.first_rank_speaks():
        raise UserError("this rank's own")
    assert len(waited) == delays


def has_open_mpi() -> bool:
    if shutil.which("mpiexec") is None:
        return False
    said = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True).stdout
    return "Open MPI" in said or "OpenRTE" in said  # what Open MPI 4 calls its mpiexec
