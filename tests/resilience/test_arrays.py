"""Array jobs of `optimus prepare`: stand-ins for the programs of batch systems, first on PATH, run the tasks of arrays."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import yaml
from typer.testing import CliRunner

from optimus import cli
from optimus.data.preparation import prepare
from optimus.data.tokenizer import train
from optimus.errors import UserError
from optimus.resilience.arrays import ArrayJob, ArrayScheduler, write_array_job

ROOT = Path(__file__).resolve().parents[2]
BATCH: list[Literal["slurm", "pbs"]] = ["slurm", "pbs"]

# Both run a job at once, task by task, far from the folder in which it is submitted, and let a job wait for another one as
# `afterok` does. Files of $PLAY: `job-ID` has the exit codes of a job, `submitted` the options, `refused` a stage that the
# batch system does not take.
_RUN = """
    script=$(cat)
    printf '%q ' "$@" >>"$PLAY/submitted"
    echo >>"$PLAY/submitted"
    stage=$(sed -n 's/^stage=//p' <<<"$script")
    [ "$(cat "$PLAY/refused" 2>/dev/null)" != "$stage" ] || { echo "no $stage here" >&2; exit 1; }
    id=$((100 + $(find "$PLAY" -name 'job-*' | wc -l)))
    : >"$PLAY/job-$id"
    cd /
    run() {
        [ -z "$after" ] || ! grep -qvx 0 "$PLAY/job-$after" || return
        for task in "$@"; do
            # shellcheck disable=SC2086
            env -i PATH="$PATH" PLAY="$PLAY" ${task:+"$variable=$task"} bash -c "$script" >>"$PLAY/said" 2>&1
            echo $? >>"$PLAY/job-$id"
        done
    }
"""
PROGRAMS = {
    "optimus": """
        line=$(printf '%q ' "$@")
        echo "$line" >>"$PLAY/calls"
        task=$5 stage=$7 before=$(($(grep -c -- "--task $5 --stage $7 " "$PLAY/calls") - 1))
        . "$PLAY/play"
    """,
    "sbatch": f"""{_RUN}
        variable=SLURM_ARRAY_TASK_ID after= parsable=
        for word in "$@"; do
            case $word in
                --parsable) parsable=yes ;;
                --array=0-*) last=${{word#*-*-*-}} ;;
                --dependency=afterok:*) after=${{word##*:}} ;;
                --kill-on-invalid-dep=yes) ;;
                *) exit 1 ;;
            esac
        done
        [ -n "$parsable" ] || exit 1
        run $(seq 0 "$last")
        echo "$id;cluster"
    """,
    "qsub": f"""{_RUN}
        variable=PBS_ARRAY_INDEX after= last=
        while [ $# -gt 0 ]; do
            case $1 in
                -J) last=${{2#0-}} ;;
                -W) after=${{2#depend=afterok:}} after=${{after%%[!0-9]*}} ;;
                *) exit 1 ;;
            esac
            shift 2
        done
        if [ -z "$last" ]; then
            run ''
            echo "$id.server"
        else
            ((last > 0)) || {{ echo "qsub: illegal -J value" >&2; exit 1; }}
            run $(seq 0 "$last")
            echo "$id[].server"
        fi
    """,
    "scancel": 'echo "$@" >>"$PLAY/cancelled"',
    "qdel": 'echo "$@" >>"$PLAY/cancelled"',
}
ARGUMENTS = ["a $text", "it's/more", "--output", "the out", "--tokenizer", "t.json"]


@dataclass
class Cluster:
    """A simulated batch system. All paths have blanks and quotes."""

    scheduler: Literal["slurm", "pbs"]
    job: ArrayJob
    path: Path  # the script
    play: Path
    environment: dict[str, str]

    def submit(self, play: str = "") -> subprocess.CompletedProcess[str]:
        """Writes the script if there is none, and submits both stages. Each task runs `play` ($task, $stage, $before:
        the number of its attempts before)."""
        (self.play / "play").write_text(play)
        command = f"bash {shlex.quote(str(self.path))}"
        if not self.path.exists():
            assert write_array_job(self.job, self.scheduler, self.path) == command
        return subprocess.run(
            command, shell=True, capture_output=True, text=True, env=self.environment, timeout=300, cwd="/"
        )

    def lines(self, name: str) -> list[str]:
        path = self.play / name
        return path.read_text().splitlines() if path.exists() else []

    def calls(self) -> list[tuple[str, str]]:
        """Returns (stage, task) of each start of `optimus prepare`. Asserts that the other arguments are as they should
        be."""
        found = []
        for line in self.lines("calls"):
            match shlex.split(line):
                case ["prepare", "--tasks", tasks, "--task", task, "--stage", stage, *others]:
                    assert (tasks, others) == (str(self.job.tasks), list(self.job.arguments))
                    found.append((stage, task))
                case _:
                    raise AssertionError(line)
        return found


def programs(folder: Path, play: Path, texts: dict[str, str]) -> dict[str, str]:
    """Writes programs, and returns the environment in which they come first."""
    for path in (folder, play):
        path.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PLAY": str(play)}


@pytest.fixture(params=BATCH)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Cluster:
    home = tmp_path / "it's a home"
    environment = programs(home / "bin", home / "play", PROGRAMS)
    job = ArrayJob(ARGUMENTS, "the out", 3, 2, folder=home, programs=home / "bin")
    return Cluster(request.param, job, home / "my job.sh", home / "play", environment)


def both(tasks: int, shard_tasks: int) -> list[tuple[str, str]]:
    return [(stage, str(n)) for stage, count in (("streams", tasks), ("shards", shard_tasks)) for n in range(count)]


@pytest.mark.parametrize("scheduler", BATCH)
@pytest.mark.parametrize("checker", [("bash", "-n"), ("shellcheck", "-s", "bash")])
def test_the_shell_has_nothing_against_it(
    scheduler: Literal["slurm", "pbs"], checker: tuple[str, ...], tmp_path: Path
) -> None:
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # programs of the virtual environment
    program = shutil.which(checker[0], path=beside)
    if program is None:
        pytest.skip(f"{checker[0]} is not installed")
    path = tmp_path / "job.sh"
    words = ARGUMENTS[1:]  # without a $, which may look like a mistake
    write_array_job(ArrayJob(words, "o", 3, 2, folder=tmp_path / "a 'b", programs=tmp_path), scheduler, path)
    done = subprocess.run([program, *checker[1:], str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("@[A-Z]+@", path.read_text())
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize(("tasks", "shard_tasks"), [(3, 2), (2, 1), (1, 1)])
def test_all_tasks_of_both_stages_run(cluster: Cluster, tasks: int, shard_tasks: int) -> None:
    """The tasks run in the folder of the job. The second stage names the first."""
    cluster.job = replace(cluster.job, tasks=tasks, shard_tasks=shard_tasks)
    done = cluster.submit('[ "$PWD" = "${PLAY%/play}" ]')
    assert (done.returncode, done.stderr) == (0, ""), cluster.lines("said")
    assert cluster.calls() == both(tasks, shard_tasks)
    assert cluster.lines("job-100") == ["0"] * tasks
    assert cluster.lines("job-101") == ["0"] * shard_tasks
    first, second = cluster.lines("submitted")
    assert "100" not in first
    assert "afterok:100" in second
    assert re.fullmatch(r"submitted: 100\S* \(stage streams, .*\), then 101\S* \(stage shards, .*\)\n", done.stdout)


@pytest.mark.parametrize("code", [1, 137])
def test_a_task_that_fails_is_tried_again(cluster: Cluster, code: int) -> None:
    done = cluster.submit(f'[ "$task-$before" != 1-0 ] || exit {code}')
    assert done.returncode == 0
    assert cluster.calls() == [
        *(("streams", task) for task in "0112"), *(("shards", task) for task in "011"),
    ]  # fmt: skip
    assert f"stage streams, task 1: attempt 1 of 3 ended with exit code {code}" in cluster.lines("said")


def test_the_second_stage_waits_for_all_tasks(cluster: Cluster) -> None:
    """A task fails three times. Both stages run when the script is submitted again."""
    cluster.submit('[ "$task" != 1 ] || exit 1')
    assert cluster.calls() == [("streams", task) for task in "01112"]
    assert cluster.lines("job-100") == ["0", "1", "0"]
    (cluster.play / "calls").unlink()
    cluster.submit()
    assert cluster.calls() == both(3, 2)


@pytest.mark.parametrize(("code", "said"), [(2, ""), (143, "told to stop"), (130, "told to stop")])
def test_bad_input_and_signals_are_not_tried_again(cluster: Cluster, code: int, said: str) -> None:
    cluster.submit(f'[ "$task" != 1 ] || exit {code}')
    assert cluster.calls() == [("streams", task) for task in "012"]
    assert cluster.lines("job-100") == ["0", str(code), "0"]
    assert said in "\n".join(cluster.lines("said"))


def test_a_stage_that_cannot_be_submitted(cluster: Cluster) -> None:
    """The batch system refuses the second array: the first, which no array would follow, is cancelled."""
    (cluster.play / "refused").write_text("shards")
    done = cluster.submit()
    assert done.returncode == 1
    assert "no shards here" in done.stderr
    assert cluster.lines("cancelled") == ["100" if cluster.scheduler == "slurm" else "100[].server"]
    assert f"job {cluster.lines('cancelled')[0]} of stage streams is cancelled" in done.stderr
    (cluster.play / "refused").write_text("streams")
    cluster.path.unlink()
    done = cluster.submit()
    assert (done.returncode, done.stdout) == (1, "")
    assert "no streams here" in done.stderr
    assert len(cluster.lines("cancelled")) == 1


def directives(cluster: Cluster, **changes: Any) -> list[str]:
    path = cluster.path.with_name(f"job-{len(list(cluster.path.parent.iterdir()))}.sh")
    write_array_job(replace(cluster.job, **changes), cluster.scheduler, path)
    return [line.split(" ", 1)[1] for line in path.read_text().splitlines() if line.startswith(("#SBATCH ", "#PBS "))]


def test_directives(cluster: Cluster) -> None:
    """A task has a node, or the cores that are named. Directives of the user replace the defaults."""
    nodes, cores = directives(cluster), directives(cluster, cores=6, time="3:00:00")
    if cluster.scheduler == "slurm":
        assert nodes == [
            "--job-name=o-the-out", "--nodes=1", "--ntasks=1", "--exclusive", "--mem=0", "--time=12:00:00", "--requeue",
        ]  # fmt: skip
        assert set(cores) - set(nodes) == {"--cpus-per-task=6", "--time=3:00:00"}
        assert set(nodes) - set(cores) == {"--exclusive", "--mem=0", "--time=12:00:00"}
        given = ["--account=physics", "--partition=cpu", "--mem-per-cpu=4G", "-J mine"]
        assert set(nodes) - set(directives(cluster, directives=given)) == {"--mem=0", "--job-name=o-the-out"}
    else:
        assert nodes == [
            "-S /bin/bash", "-N o-the-out", "-l select=1", "-l place=excl", "-l walltime=12:00:00", "-r y", "-j oe",
        ]  # fmt: skip
        assert set(cores) - set(nodes) == {"-l select=1:ncpus=6", "-l walltime=3:00:00"}
        assert set(nodes) - set(cores) == {"-l select=1", "-l place=excl", "-l walltime=12:00:00"}
        given = ["-A physics", "-W group_list=x", "-l select=1:ncpus=8:mem=16gb"]
        assert set(nodes) - set(directives(cluster, directives=given)) == {"-l select=1"}
    assert directives(cluster, directives=given)[-len(given) :] == given


@pytest.mark.parametrize(
    ("scheduler", "changes", "message"),
    [
        (
            "slurm",
            {"directives": ["--array=0-9"]},
            "--directive '--array=0-9': the script for `prepare` chooses --array: ",
        ),
        ("slurm", {"directives": ["-a 0-9"]}, "chooses --array: give --tasks instead"),
        ("slurm", {"directives": ["-c 4"]}, "chooses --cpus-per-task: give --cpus-per-task instead"),
        ("slurm", {"directives": ["-d afterok:1"]}, "chooses --dependency: leave it out"),
        ("slurm", {"directives": ["-A x -N2"]}, "chooses --nodes: leave it out"),
        ("pbs", {"directives": ["-J 0-9"]}, "chooses -J: give --tasks instead"),
        ("pbs", {"directives": ["-W depend=afterok:1"]}, "chooses -W depend: leave it out"),
        ("slurm", {"directives": ["--time=1:00:00"]}, "give --time instead"),
        ("pbs", {"directives": ["-A x\nrm -rf ."]}, "one line"),
        ("pbs", {"time": "90"}, "--time 90: give HOURS:MINUTES:SECONDS"),
        ("slurm", {"tasks": 0}, "--tasks 0: give at least 1"),
        ("slurm", {"shard_tasks": 0}, "--shard-tasks 0: give at least 1"),
        ("slurm", {"shard_tasks": 4}, "--shard-tasks 4: give at most the 3 of --tasks"),
        ("pbs", {"cores": 0}, "--cpus-per-task 0: give at least 1"),
        ("slurm", {"output": "s3://bucket/out"}, "--output s3://bucket/out: tasks meet in a folder that all nodes see"),
        ("jobset", {"directives": []}, "--scheduler jobset needs --directive image=...: the image of the containers"),
        ("jobset", {"directives": ["image=x"]}, "--scheduler jobset needs --directive claim=...: a volume claim that"),
        ("jobset", {"directives": ["image=x", "claim=y"]}, "--directive claim=y: give CLAIM:/PATH"),
        ("jobset", {"directives": ["image=x", "resource=y"]}, "--directive resource=...: valid: claim, image, memory"),
        ("jobset", {"output": "out"}, "--output out: give a folder below /data, the volume that all tasks share"),
        ("jobset", {"output": "/data"}, "--output /data: give a folder below /data"),
        ("jobset", {"output": "/data/../x"}, "--output /data/../x: give a folder below /data"),
        ("jobset", {"output": "/database/x"}, "--output /database/x: give a folder below /data"),
    ],
)
def test_bad_jobs(scheduler: ArrayScheduler, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    usual = ["image=x", "claim=y:/data"] if scheduler == "jobset" else []
    output = "/data/out" if scheduler == "jobset" else "out"
    job = ArrayJob(ARGUMENTS, output, 3, 2, folder=tmp_path, programs=tmp_path, directives=usual)
    with pytest.raises(UserError) as found:
        write_array_job(replace(job, **changes), scheduler, tmp_path / "job")
    assert message in str(found.value)
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("scheduler", get_args(ArrayScheduler))
def test_a_file_is_not_overwritten(scheduler: ArrayScheduler, tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.write_text("mine")
    usual = ["image=x", "claim=y:/data"] if scheduler == "jobset" else []
    job = ArrayJob(ARGUMENTS, "/data/out", 3, 2, folder=tmp_path, programs=tmp_path, directives=usual)
    with pytest.raises(UserError, match="exists already"):
        write_array_job(job, scheduler, path)
    assert path.read_text() == "mine"


# ---- The command ----


def launched(*words: str) -> tuple[int, str]:
    """Runs `optimus launch --prepare`. Returns its exit code and what it printed."""
    done = CliRunner().invoke(cli.app, ["launch", "--prepare", *words], catch_exceptions=False)
    return done.exit_code, done.output


def script_arguments(path: Path) -> list[str]:
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("arguments=(")]
    return shlex.split(line.removeprefix("arguments=(").removesuffix(")"))


@pytest.mark.parametrize("scheduler", BATCH)
def test_the_command_line(scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words after -- stay as they are, URLs too. --output before and after -- are two things."""
    monkeypatch.chdir(tmp_path)
    words = ["s3://bucket/a b", "texts/", "--output", "data/out", "--train-tokenizer", "4096", "--text-field", "a=b"]
    words += ["--exclude", "sets/arc", "--exclude", "sets/piqa.jsonl", "--exclude-words", "10"]
    options = ["--scheduler", scheduler, "--tasks", "4", "--output", "my job.sh", "--directive=-A x"]
    code, said = launched(*options, "--", *words)
    assert code == 0
    assert said == "my job.sh: tasks that tokenise: 4, that write the shards: 4; submit it with: bash 'my job.sh'\n"
    text = Path("my job.sh").read_text()
    assert script_arguments(Path("my job.sh")) == words
    assert f"cd -- {shlex.quote(str(tmp_path))} ||" in text
    assert f"PATH=$PATH:{shlex.quote(str(Path(sys.executable).parent))} " in text
    assert not Path("data").exists()
    code, said = launched(
        *options[:-3], "--output=b.sh", "--shard-tasks=2", "--cpus-per-task=6", "--json", "--", *words
    )
    assert json.loads(said) == {"output": "b.sh", "submit": "bash b.sh", "tasks": 4, "shard_tasks": 2}
    assert script_arguments(Path("b.sh")) == ["--workers", "6", *words]
    launched(*options[:-3], "--output=c.sh", "--cpus-per-task=6", "--", *words, "--workers", "2")
    assert script_arguments(Path("c.sh")) == [*words, "--workers", "2"]


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ([], ["--toknizer", "t"], "No such option: --toknizer"),
        ([], ["--context", "many"], "Invalid value for '--context'"),
        ([], ["--pack", "tight"], "Invalid value for '--pack'"),
        ([], ["--tokenizer", "t", "--train-tokenizer", "300"], "give either --tokenizer or --train-tokenizer after --"),
        ([], [], "give either --tokenizer or --train-tokenizer after --"),
        ([], ["--tokenizer", "t", "--shard-size", "big"], "big"),
        ([], ["--tokenizer", "t", "--output", "s3://bucket/o"], "--output s3://bucket/o: tasks meet in a folder"),
        *(
            ([], ["--tokenizer", "t", *words], f"{words[0].split('=')[0]} after --: leave it out")
            for words in (
                ["--tasks", "3"],
                ["--task=1"],
                ["--stage", "streams"],
                ["--status"],
                ["--preview"],
                ["--json"],
            )
        ),
        (["--nodes", "2"], ["--tokenizer", "t"], "--nodes: leave it out with --prepare"),
        (["--set", "a=b"], ["--tokenizer", "t"], "--set: leave it out with --prepare"),
        (["--check"], ["--tokenizer", "t"], "--check: leave it out with --prepare"),
        (["--scheduler", "ray"], ["--tokenizer", "t"], "--prepare needs --scheduler slurm, pbs or jobset"),
        (["--scheduler", "jobset", "--time", "1:00:00"], ["--tokenizer", "t"], "--time: a manifest for jobset has no"),
    ],
)
def test_bad_options(
    options: list[str], words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code, said = launched(
            "--scheduler=slurm", "--tasks=2", "--output=job", *options, "--", "a", "--output=o", *words
        )
    except UserError as error:
        code, said = error.code, str(error)
    assert code == 2
    assert message in " ".join(said.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_the_folder_of_prepare_is_missing(tmp_path: Path) -> None:
    """The option before -- names the file alone."""
    options = ["--scheduler=slurm", "--tasks=2", f"--output={tmp_path / 'job'}"]
    try:
        code, said = launched(*options, "--", "a", "--tokenizer", "t")
    except UserError as error:
        code, said = error.code, str(error)
    assert code == 2
    assert "--output" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prepare", "a"], "--prepare needs --scheduler slurm, pbs or jobset"),
        (["--prepare", "--scheduler", "pbs", "a"], "--prepare needs --output PATH before --"),
        (["--prepare", "--scheduler", "pbs", "--output", "o", "a"], "--prepare needs --tasks N"),
        (["--tasks", "2", "run.yaml"], "--tasks: it needs --prepare"),
        (["--cpus-per-task", "2", "run.yaml"], "--cpus-per-task: it needs --prepare"),
    ],
)
def test_options_that_are_missing(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as found:
        CliRunner().invoke(cli.app, ["launch", *words], catch_exceptions=False)
    assert message in str(found.value)


def test_jobset(tmp_path: Path) -> None:
    """The manifest is read in full by the published schema. The second Job depends on the first, and shares its volume."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    words = ["s3://bucket/a", "--output", "/data/my out", "--tokenizer", "/data/t.json"]
    path = tmp_path / "job.yaml"
    options = ["--directive", "image=registry/optimus:1", "--directive", "claim=data:/data"]
    more = ["--directive", "memory=32Gi", "--cpus-per-task", "8", "--shard-tasks", "2"]
    code, said = launched("--scheduler=jobset", "--tasks=3", f"--output={path}", *options, *more, "--", *words)
    assert code == 0
    assert f"submit it with: kubectl apply -f {path}" in said.replace("\n", "")
    found = yaml.safe_load(path.read_text())
    assert json.loads(models.JobsetV1alpha2JobSet.from_dict(found).to_json()) == found
    assert found["metadata"]["name"] == "optimus-my-out"
    streams, shards = found["spec"]["replicatedJobs"]
    assert "dependsOn" not in streams
    assert shards["dependsOn"] == [{"name": streams["name"], "status": "Complete"}]
    for replicated, count in ((streams, 3), (shards, 2)):
        spec = replicated["template"]["spec"]
        assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", count, count)
        assert spec["backoffLimitPerIndex"] > 0
        assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "FailIndex"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        command = ["optimus", "prepare", "--tasks", "3", "--stage", replicated["name"], "--workers", "8", *words]
        assert container["command"] == command
        assert container["resources"] == {"limits": {"cpu": "8", "memory": "32Gi"}}
        assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/data"}]
        assert pod["volumes"] == [{"name": "shared", "persistentVolumeClaim": {"claimName": "data"}}]
        assert pod["restartPolicy"] == "Never"  # what a policy for failures needs
        assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == container["name"]
    assert "&" not in path.read_text()  # no anchors


# ---- With `optimus prepare` itself ----


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder that one call has prepared, and the arguments that prepare another one the same way, but for --output."""
    folder = tmp_path_factory.mktemp("prepared")
    text, tokenizer = folder / "a text.jsonl", folder / "tokenizer.json"
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}, says line {n % 7}"}) for n in range(300)]
    text.write_text("\n".join(lines))
    train((json.loads(line)["text"] for line in lines), 300, tokenizer)
    prepare([text], folder / "data", tokenizer=tokenizer, context=32, workers=1, dedup="exact")
    words = [str(text), "--tokenizer", str(tokenizer), "--context", "32", "--workers", "1", "--dedup", "exact"]
    return folder / "data", words


@pytest.mark.parametrize("scheduler", get_args(ArrayScheduler))
def test_the_calls_of_both_arrays_prepare_the_data_of_one_call(
    scheduler: ArrayScheduler, prepared: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is that of one call, byte for byte. The calls run in this process, in the order of the batch system."""
    usual = [f"--directive=claim=data:{tmp_path}", "--directive=image=x"] if scheduler == "jobset" else []
    path, play = tmp_path / "job", tmp_path / "play"
    options = [f"--scheduler={scheduler}", "--tasks=2", "--shard-tasks=1", f"--output={path}"]
    code, said = launched(*options, *usual, "--", *prepared[1], "--output", str(tmp_path / "data"))
    assert code == 0, said
    calls: list[tuple[str, list[str]]] = []  # JOB_COMPLETION_INDEX and the arguments of `optimus`
    if scheduler == "jobset":
        for replicated in yaml.safe_load(path.read_text())["spec"]["replicatedJobs"]:
            job = replicated["template"]["spec"]
            command = job["template"]["spec"]["containers"][0]["command"]
            calls += [(str(number), command[1:]) for number in range(job["completions"])]
    else:
        environment = programs(tmp_path / "bin", play, PROGRAMS)
        (play / "play").touch()
        subprocess.run(["bash", str(path)], env=environment, check=True, capture_output=True)
        calls += [("", shlex.split(line)) for line in (play / "calls").read_text().splitlines()]
    assert len(calls) == 3
    for index, words in calls:
        assert not (tmp_path / "data").exists()
        if index:
            monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
        done = CliRunner().invoke(cli.app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert contents(tmp_path / "data") == contents(prepared[0])


@pytest.mark.in_turn(1, 4)
def test_an_array_runs_prepare(prepared: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Every task is a process: two that tokenise, and one that writes the shards."""
    options = ["--scheduler=slurm", "--tasks=2", "--shard-tasks=1", f"--output={tmp_path / 'job'}"]
    code, said = launched(*options, "--", *prepared[1], "--output", str(tmp_path / "data"))
    assert code == 0, said
    program = f'PYTHONPATH={shlex.quote(str(ROOT))} OMP_NUM_THREADS=1 exec {sys.executable} -m optimus "$@"'
    environment = programs(tmp_path / "bin", tmp_path / "play", PROGRAMS | {"optimus": program})
    done = subprocess.run(["bash", str(tmp_path / "job")], env=environment, capture_output=True, text=True)
    logged = (tmp_path / "play" / "said").read_text()
    assert (done.returncode, done.stderr) == (0, ""), logged
    assert (tmp_path / "play" / "job-101").read_text() == "0\n", logged
    assert contents(tmp_path / "data") == contents(prepared[0])
