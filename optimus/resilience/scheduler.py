"""Batch script of a fault-tolerant run: a job with spare nodes, and a loop that relaunches the run without faulty
nodes.

The template is `job.sh` in this folder; `slurm.sh` and `pbs.sh` contain the functions for each batch system.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from optimus.config.sizes import counted
from optimus.disk import printable, user_path
from optimus.errors import UserError, naming_disk_errors

Scheduler = Literal["slurm", "pbs"]

_WARNING = 120  # seconds from the warning to the job's time limit; meanwhile, ranks finish their step and save


@dataclass(frozen=True)
class BatchJob:
    """The parameters of the script.

    `command` is the command of a node, without the options that differ between attempts or nodes.
    """

    scheduler: Scheduler
    command: Sequence[str]
    run: Path  # the run folder, absolute
    folder: Path  # working directory of the command, absolute
    programs: Path  # folder with an `optimus` program, in case the job's PATH has none
    nodes: int
    spares: int
    time: str = "12:00:00"  # HOURS:MINUTES:SECONDS
    directives: Sequence[str] = field(default=())  # lines for the batch system, without #SBATCH or #PBS


def write_script(job: BatchJob, path: Path) -> str:
    """Writes the script, and returns the command that submits the script."""
    path = user_path(path)
    submit = f"{_SUBMIT[job.scheduler]} {shlex.quote(str(path))}"
    write_executable(path, script(job, submit))
    return submit


def write_executable(path: Path, text: str) -> None:
    """Creates the program `path` with `text`. Raises `UserError` as `write_new` does."""
    path = user_path(path)
    write_new(path, text)
    with naming_disk_errors(path, "Give --output another path"):
        path.chmod(0o755)


def write_new(path: Path, text: str) -> None:
    """Creates the file `path` with `text`.

    Raises `UserError` when `path` exists, cannot be written, or has unprintable characters. Such characters could end
    a comment of `text` that names `path`.
    """
    path = user_path(path)
    if printable(str(path)) != str(path):
        raise UserError(
            f"--output {printable(str(path))}: the name has characters that cannot be printed: give another name"
        )
    with naming_disk_errors(path, "Give --output another path"):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"--output {path} exists already: give another name") from None


def script(job: BatchJob, submit: str) -> str:
    """Returns the text of the script. `submit` is the command that submits the script."""
    _check(job)
    values = {
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
    return fill_template("job", job.scheduler, values)


_SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}


def fill_template(name: str, system: str, values: Mapping[str, str]) -> str:
    """Returns the text of `name`.sh in this folder, with `system`.sh at @SYSTEM@ and a value at each other @NAME@."""
    text = _part(name).replace("@SYSTEM@", _part(system))
    return re.sub("@([A-Z]+)@", lambda found: values[found[1]], text)


def _part(name: str) -> str:
    return Path(__file__).with_name(f"{name}.sh").read_text(encoding="utf-8")


def _check(job: BatchJob) -> None:
    check_time_and_directives(job.time, job.directives)
    if _seconds(job.time) <= 2 * _WARNING:
        raise UserError(f"--time {job.time}: give more than {2 * _WARNING} s; the last {_WARNING} are for saving")
    for text in job.directives:
        nodes = re.search(r"(?:^|\s)(?:--nodes[=\s]\s*|-N\s*)(\S+)", text) if job.scheduler == "slurm" else None
        if nodes is not None and nodes[1] != str(job.nodes + job.spares):
            raise UserError(
                f"--directive '{text}': the job has {counted(job.nodes, 'node')} and {counted(job.spares, 'spare')}: change "
                "--nodes or --spares"
            )


def check_time_and_directives(time: str, directives: Sequence[str]) -> None:
    """Raises `UserError` for a time limit that is not HOURS:MINUTES:SECONDS, and for a directive that is not one line
    for the batch system or sets a time limit."""
    if not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", time):
        raise UserError(f"--time {time}: give HOURS:MINUTES:SECONDS, such as 12:00:00")
    for text in directives:
        if printable(text, keep="\t") != text or text.startswith("#") or not text:
            raise UserError(f"--directive {text!r}: give one line without #SBATCH or #PBS, such as '--account=physics'")
        if re.search(r"(?:^|\s)(?:--time(?=[\s=]|$)|-t|-l *(?:\S*,)?walltime\b)", text):
            raise UserError(f"--directive '{text}': give --time instead, so that the script knows when to save")


def job_name(folder: Path) -> str:
    """Returns a name of a job about `folder`, which every batch system accepts."""
    return f"o-{re.sub(r'[^A-Za-z0-9]+', '-', folder.name).strip('-')}"[:15]  # the limit of some versions of PBS


def _directives(job: BatchJob) -> list[str]:
    count = job.nodes + job.spares
    if job.scheduler == "slurm":
        defaults = [
            f"--job-name={job_name(job.run)}",
            f"--nodes={count}",
            "--ntasks-per-node=1",
            "--exclusive",
            f"--time={job.time}",
            f"--signal=B:TERM@{_WARNING}",
            "--no-kill",  # keep the job alive when a node fails
        ]
    else:
        defaults = [
            "-S /bin/bash",
            f"-N {job_name(job.run)}",
            f"-l select={count}",
            "-l place=scatter:excl",
            f"-l walltime={job.time}",
            "-W tolerate_node_failures=all",
            "-j oe",
        ]
    return directive_lines(job.scheduler, defaults, job.directives)


def directive_lines(scheduler: Scheduler, defaults: Sequence[str], directives: Sequence[str]) -> list[str]:
    """Returns the lines for the batch system. A user's directive replaces the default for the same option."""
    replaced = {option for text in directives for option in directive_options(scheduler, text)}
    remaining = [text for text in defaults if replaced.isdisjoint(directive_options(scheduler, text))]
    return [f"{_HEADS[scheduler]} {text}" for text in [*remaining, *directives]]


_HEADS = {"slurm": "#SBATCH", "pbs": "#PBS"}
# Names of Slurm's short options, and of options that exclude one another.
_NAMES = {"-J": "--job-name", "-N": "--nodes", "-t": "--time", "-a": "--array", "-d": "--dependency", "-n": "--ntasks"}
_NAMES |= {"-c": "--cpus-per-task", "--mem-per-cpu": "--mem", "--mem-per-gpu": "--mem"}


def directive_options(scheduler: Scheduler, text: str) -> set[str]:
    """Returns the names of the options in a directive; PBS's -l and -W are options per name of their values."""
    found, words = set[str](), text.split()
    for word, following in zip(words, [*words[1:], ""]):
        if scheduler == "slurm" and word.startswith("-"):
            option = word.split("=")[0] if word.startswith("--") else word[:2]
            found.add(_NAMES.get(option, option))
        elif word.startswith(("-l", "-W")):
            found |= {f"{word[:2]} {value.split('=')[0]}" for value in (word[2:] or following).split(",")}
        elif word.startswith("-"):
            found.add(word[:2])
    return found


def _seconds(time: str) -> int:
    hours, minutes, seconds = map(int, time.split(":"))
    return 3600 * hours + 60 * minutes + seconds
