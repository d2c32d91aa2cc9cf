"""Writes the array jobs of `optimus prepare`: a script that submits both stages, or a JobSet with a Job for each of them.

The template of the scripts is `array.sh` in this folder; `array-slurm.sh` and `array-pbs.sh` contain the functions for
each batch system.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from optimus.copies import is_url, url_text
from optimus.errors import UserError
from optimus.resilience.manifests import (
    check_names,
    jobset_text,
    manifest_name,
    parse_claim,
    parse_directives,
    pod_template,
)
from optimus.resilience.scheduler import (
    Scheduler,
    check_time_and_directives,
    directive_lines,
    directive_options,
    fill_template,
    job_name,
    write_executable,
    write_new,
)

ArrayScheduler = Literal["slurm", "pbs", "jobset"]

_RETRIES = 3  # of a pod that fails; each continues the one before


@dataclass(frozen=True)
class ArrayJob:
    """The parameters of the two array jobs.

    `arguments` are those of `optimus prepare` without the options that differ between tasks or stages. `output` is the
    one of `prepare`.
    """

    arguments: Sequence[str]
    output: str
    tasks: int  # of the stage that tokenises
    shard_tasks: int  # of the stage that writes the shards
    folder: Path  # working directory of the tasks of a batch system, absolute
    programs: Path  # folder with an `optimus` program, in case a job's PATH has none
    cores: int | None = None  # of a task; None: all of its node
    time: str = "12:00:00"  # HOURS:MINUTES:SECONDS
    directives: Sequence[str] = ()


class _Row(NamedTuple):
    """A row of the table of schedulers: what writes the text of the file, and the command that submits the file."""

    text: Callable[[ArrayJob, str], str]
    submit: str
    is_program: bool


def write_array_job(job: ArrayJob, scheduler: ArrayScheduler, path: Path) -> str:
    """Writes the file that submits both array jobs, and returns the command that submits the file.

    Raises `UserError` for numbers that do not fit, an output that tasks cannot share, a bad directive or time limit,
    and a `path` that exists or cannot be written.
    """
    _check(job)
    row = _ROWS[scheduler]
    submit = row.submit.format(shlex.quote(str(path)))
    (write_executable if row.is_program else write_new)(path, row.text(job, submit))
    return submit


def _check(job: ArrayJob) -> None:
    for name, number in (("tasks", job.tasks), ("shard-tasks", job.shard_tasks), ("cpus-per-task", job.cores)):
        if number is not None and number < 1:
            raise UserError(f"--{name} {number}: give at least 1")
    if job.shard_tasks > job.tasks:
        raise UserError(f"--shard-tasks {job.shard_tasks}: give at most the {job.tasks} of --tasks")
    if is_url(job.output):
        raise UserError(
            f"--output {url_text(job.output)}: tasks meet in a folder that all nodes see: "
            "give one, and copy it to the URL afterwards"
        )


def _slurm(job: ArrayJob, submit: str) -> str:
    shared = ["--exclusive", "--mem=0"] if job.cores is None else [f"--cpus-per-task={job.cores}"]
    defaults = [
        f"--job-name={job_name(Path(job.output))}",
        "--nodes=1",
        "--ntasks=1",
        *shared,
        f"--time={job.time}",
        "--requeue",  # after the failure of a node
    ]
    return _script(job, "slurm", submit, defaults)


def _pbs(job: ArrayJob, submit: str) -> str:
    shared = ["-l select=1", "-l place=excl"] if job.cores is None else [f"-l select=1:ncpus={job.cores}"]
    defaults = [
        "-S /bin/bash",
        f"-N {job_name(Path(job.output))}",
        *shared,
        f"-l walltime={job.time}",
        "-r y",  # after the failure of a node
        "-j oe",
    ]
    return _script(job, "pbs", submit, defaults)


# Options of the batch systems that the script chooses, and the options of `optimus launch` to use. Without one, the
# user leaves the directive out.
_CHOSEN = {
    "--array": "--tasks",
    "--cpus-per-task": "--cpus-per-task",
    "--dependency": "",
    "--nodes": "",
    "--ntasks": "",
    "-W depend": "",
}


def _script(job: ArrayJob, scheduler: Scheduler, submit: str, defaults: Sequence[str]) -> str:
    check_time_and_directives(job.time, job.directives)
    chosen = _CHOSEN | ({"-J": "--tasks"} if scheduler == "pbs" else {})
    for text in job.directives:
        for option in sorted(directive_options(scheduler, text) & set(chosen)):
            cure = f"give {chosen[option]} instead" if chosen[option] else "leave it out"
            raise UserError(f"--directive '{text}': the script for `prepare` chooses {option}: {cure}")
    values = {
        "DIRECTIVES": "\n".join(directive_lines(scheduler, defaults, job.directives)),
        "SCHEDULER": scheduler,
        "SUBMIT": f"`{submit}`",
        "TASKS": str(job.tasks),
        "SHARDTASKS": str(job.shard_tasks),
        "FOLDER": shlex.quote(str(job.folder)),
        "BIN": shlex.quote(str(job.programs)),
        "ARGUMENTS": shlex.join(job.arguments),
    }
    return fill_template("array", f"array-{scheduler}", values)


_JOBSET_DIRECTIVES = {
    "image": "the image of the containers, with Optimus, such as image=registry/optimus:1",
    "claim": "a volume claim that all tasks share and its path, such as claim=data:/data",
    "memory": "the memory of a task, such as memory=32Gi",
}


def _jobset(job: ArrayJob, submit: str) -> str:
    directives = parse_directives(job.directives)
    check_names("jobset", directives, _JOBSET_DIRECTIVES, ("image", "claim"))
    _, volume = parse_claim(directives)
    output = PurePosixPath(job.output)
    if ".." in output.parts or PurePosixPath(volume) not in output.parents:
        raise UserError(f"--output {job.output}: give a folder below {volume}, the volume that all tasks share")
    limits = {} if job.cores is None else {"cpu": str(job.cores)}
    limits |= {"memory": directives["memory"]} if "memory" in directives else {}

    def replicated(stage: str, count: int) -> dict[str, Any]:
        # The variable JOB_COMPLETION_INDEX of an indexed Job's pod has the number of its task.
        command = ["optimus", "prepare", "--tasks", str(job.tasks), "--stage", stage, *job.arguments]
        spec = {
            "parallelism": count,
            "completions": count,
            "completionMode": "Indexed",
            "backoffLimitPerIndex": _RETRIES,
            "podFailurePolicy": _failure_policy(),
            "template": pod_template(directives, command, limits),
        }
        return {"name": stage, "replicas": 1, "template": {"spec": spec}}

    text = jobset_text(
        manifest_name(Path(output)),
        {
            "network": {"enableDNSHostnames": False},  # tasks meet in the shared folder alone
            "replicatedJobs": [
                replicated("streams", job.tasks),
                replicated("shards", job.shard_tasks) | {"dependsOn": [{"name": "streams", "status": "Complete"}]},
            ],
        },
    )
    return f"# Written by `optimus launch --prepare --scheduler jobset`; submit it with `{submit}`.\n{text}"


def _failure_policy() -> dict[str, Any]:
    return {
        "rules": [
            # A pod that is evicted or loses its node does not count.
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            # Bad input, which another pod cannot cure. The other tasks go on.
            {"action": "FailIndex", "onExitCodes": {"containerName": "optimus", "operator": "In", "values": [2]}},
        ]
    }


_ROWS: dict[ArrayScheduler, _Row] = {
    "slurm": _Row(_slurm, "bash {}", True),
    "pbs": _Row(_pbs, "bash {}", True),
    "jobset": _Row(_jobset, "kubectl apply -f {}", False),
}
