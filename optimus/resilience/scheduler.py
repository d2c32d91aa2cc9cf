"""A batch script that keeps a training going: a job with spare nodes, and in it a loop that launches again without bad ones.

The script is `job.sh` beside this file; `slurm.sh` and `pbs.sh` are what differs. Words in capitals between two @ are filled
in here. What it relies on:

- exclusions are names of nodes in the run folder (`exclusion.py`), and its event log says when the run has finished;
- each attempt is a launch of its own in the store, as a rendezvous that is closed stays so.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from optimus.disk import user_path
from optimus.errors import UserError, naming_disk_errors

Scheduler = Literal["slurm", "pbs"]

_WARNING = 120  # seconds before the end of the job's time in which ranks finish their step and save


@dataclass(frozen=True)
class BatchJob:
    """What the script is made of. `command` is that of a node, but for what differs between attempts and nodes."""

    scheduler: Scheduler
    command: Sequence[str]
    run: Path  # its folder, absolute
    folder: Path  # where the command is run, absolute
    programs: Path  # where an `optimus` is, should the job's PATH have none
    nodes: int
    spares: int
    time: str = "12:00:00"  # HOURS:MINUTES:SECONDS
    directives: Sequence[str] = field(default=())  # for the batch system, without #SBATCH or #PBS


def write_script(job: BatchJob, path: Path) -> str:
    """Write the script; returns the command that submits it.

    Raises `UserError` when `path` exists or cannot be written, and for a time or directives that make no job.
    """
    path = user_path(path)
    text = script(job, submit := f"{_SUBMIT[job.scheduler]} {shlex.quote(str(path))}")
    with naming_disk_errors(path, "Give --output another path"):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"--output {path}: it exists already, and is not overwritten; give another name") from None
        path.chmod(0o755)
    return submit


def script(job: BatchJob, submit: str) -> str:
    """The text of the script, which names `submit` as the command for it. Raises `UserError` as `write_script` does."""
    _check(job)
    filled = {
        "DIRECTIVES": "\n".join(_directives(job)),
        "SCHEDULER": job.scheduler,
        "SUBMIT": f"`{submit}`",
        "FOLDER": shlex.quote(str(job.folder)),
        "BIN": shlex.quote(str(job.programs)),
        "RUN": shlex.quote(str(job.run)),
        "NODES": str(job.nodes),
        "COMMAND": shlex.join(job.command),
        "UNWARNED": str(_seconds(job.time) - _WARNING),
    }
    text = _part("job").replace("@SYSTEM@", _part(job.scheduler))
    return re.sub("@([A-Z]+)@", lambda found: filled[found[1]], text)


_SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}


def _part(name: str) -> str:
    return Path(__file__).with_name(f"{name}.sh").read_text(encoding="utf-8")


def _check(job: BatchJob) -> None:
    if not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", job.time):
        raise UserError(f"--time {job.time}: give HOURS:MINUTES:SECONDS, such as 12:00:00")
    if _seconds(job.time) <= 2 * _WARNING:
        raise UserError(f"--time {job.time}: give more than {2 * _WARNING} s; the last {_WARNING} are for saving")
    for text in job.directives:
        if "\n" in text or text.startswith("#") or not text:
            raise UserError(f"--directive {text!r}: give one line without #SBATCH or #PBS, such as '--account=physics'")
        if re.match(r"(--time|-t|-l *walltime)\b", text):
            raise UserError(f"--directive '{text}': give --time instead, by which the script knows when to save")


def _directives(job: BatchJob) -> list[str]:
    """Lines for the batch system: ours, those that the user gives as well left out, then the user's."""
    count = job.nodes + job.spares
    name = f"o-{re.sub(r'[^A-Za-z0-9]+', '-', job.run.name).strip('-')}"[:15]  # both systems take no more than this
    if job.scheduler == "slurm":
        head = "#SBATCH"
        ours = [
            f"--job-name={name}",
            f"--nodes={count}",
            "--ntasks-per-node=1",
            "--exclusive",
            f"--time={job.time}",
            f"--signal=B:TERM@{_WARNING}",
            "--no-kill",  # the job, when a node fails
        ]
    else:
        head = "#PBS"
        ours = [
            "-S /bin/bash",
            f"-N {name}",
            f"-l select={count}",
            "-l place=scatter:excl",
            f"-l walltime={job.time}",
            "-W tolerate_node_failures=all",
            "-j oe",
        ]
    given = {text.split("=")[0] for text in job.directives}
    return [f"{head} {text}" for text in [*(text for text in ours if text.split("=")[0] not in given), *job.directives]]


def _seconds(time: str) -> int:
    hours, minutes, seconds = map(int, time.split(":"))
    return 3600 * hours + 60 * minutes + seconds
