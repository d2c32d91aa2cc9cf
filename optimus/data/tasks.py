"""The tasks of an unfinished `prepare`: how they begin, and what can be said of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from optimus.data import journal, shards
from optimus.disk import parse_json, temporary_name, user_path, write_json
from optimus.errors import UserError

SETTINGS = "tasks.json"
TASKS = "tasks"  # the setting with the number of tasks
SKIP_BAD = "skip_bad"  # the setting of tasks that leave out bad files, which determines the borders of their ranges
OF_TASKS = (TASKS, SKIP_BAD, journal.FILES)  # settings that the output does not depend on
_FAILED = "failed.json"
_LISTED = 3  # maximum number of tasks in a row that are not begun and have a line each


def task_name(number: int) -> str:
    """Returns the name of the folder of a task."""
    return f"task-{number:05d}"


def output_folder(output: str | Path) -> Path:
    """Returns the absolute path of an output, behind a symbolic link: a folder cannot be renamed to a link."""
    path = Path(os.path.abspath(user_path(output)))
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def begin_tasks(partial: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of all tasks into the folder, or raises `UserError` if they differ from those there."""
    path = partial / SETTINGS
    if not path.exists():
        if (partial / journal.FILE).exists():
            raise UserError(f"{partial} was begun without tasks. Delete it to start over, or choose another `output`.")
        partial.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        write_json(temporary, settings)
        with suppress(FileExistsError):  # another task was first
            os.link(temporary, path)
        temporary.unlink()
    if different := journal.differences(_settings(partial), settings):
        raise UserError(
            f"{partial} was begun with other settings ({different}). Delete it to start over, or choose another `output`."
        )


def _settings(partial: Path) -> dict[str, Any]:
    path = partial / SETTINGS
    try:
        settings = dict(parse_json(path.read_bytes()))
        settings[TASKS] = int(settings[TASKS])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}). Delete {partial} and run again.") from error
    return settings


@contextmanager
def noting_failure(folder: Path) -> Iterator[None]:
    """Notes a `UserError` of the block in the folder of the task, until the task is started again."""
    (folder / _FAILED).unlink(missing_ok=True)
    try:
        yield
    except (UserError, OSError) as error:
        with suppress(OSError):
            write_json(folder / _FAILED, {"error": str(error)})
        raise


def prepare_status(output: str | Path) -> dict[str, Any]:
    """Describes the progress of the tasks that prepare the folder `output`.

    The result has `complete` (of the output), `tasks`, and `missing` (the numbers of tasks that have not written their
    streams). `states` has for each task `task`, `state`, `read` (the share of its inputs), `tokens` and `error`. The
    states are "not begun", "at work", "stopped", "failed" and "done". `shards` is the number of finished shards,
    or of finished blocks of token files.

    Raises `UserError` if no tasks prepare `output`.

    Example:
        optimus.prepare_status("data")["missing"]
    """
    output = output_folder(output)
    partial = output if output.name.endswith(".partial") else output.with_name(f"{output.name}.partial")
    if (output / shards.INDEX).exists():
        return {
            "complete": True,
            "tasks": 0,
            "missing": [],
            "states": [],
            "shards": len(shards.parts_of(shards.read_index(output, token_files=True))),
        }
    if not (partial / SETTINGS).exists():
        raise UserError(f"no tasks prepare {output}: {partial / SETTINGS} does not exist")
    tasks = _settings(partial)[TASKS]
    states = [{"task": number, **_state(partial / task_name(number))} for number in range(tasks)]
    return {
        "complete": False,
        "tasks": tasks,
        "missing": [each["task"] for each in states if each["state"] != "done"],
        "states": states,
        "shards": len([*partial.glob("*.sha256")]),
    }


def _state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"state": "not begun", "read": 0.0, "tokens": 0, "error": None}
    if not (folder / journal.LOCK).exists():
        return found
    state = journal.read(folder)
    if state is not None:
        found |= {"read": 1.0 if state.complete else state.read, "tokens": state.mark.tokens}
    if state is not None and state.complete:
        return found | {"state": "done"}
    with journal.held(folder, shared=True) as lock:
        if not lock:
            return found | {"state": "at work"}
    if not (folder / _FAILED).exists():
        return found | {"state": "stopped"}
    return found | {"state": "failed", "error": str(parse_json((folder / _FAILED).read_bytes())["error"])}


def status_text(status: dict[str, Any]) -> str:
    """Returns a line for each task that is not done, with what to do; one for tasks in a row that are not begun."""
    cures = {
        "not begun": "start it",
        "at work": "wait for its end",
        "stopped": "start it again: it goes on from there",
        "failed": "start it again after the cure: it goes on from there",
    }
    lines = []
    for idle, group in groupby(status["states"], lambda each: each["state"] == "not begun"):
        waiting = [*group]
        if idle and len(waiting) > _LISTED:
            lines.append(f"tasks {waiting[0]['task']} to {waiting[-1]['task']}: not begun; start them")
            continue
        for each in waiting:
            if each["state"] == "done":
                continue
            read = f" at {100 * each['read']:.0f} %" if each["state"] in ("at work", "stopped") else ""
            why = f" ({each['error']})" if each["error"] else ""
            lines.append(f"task {each['task']}: {each['state']}{read}{why}; {cures[each['state']]}")
    return "\n".join(lines)
