"""Divides the inputs of `prepare` into contiguous ranges, one for each task."""

import os
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

from optimus.data import files
from optimus.data.files import Sources
from optimus.data.readers import READERS
from optimus.errors import UserError

# Variables of an array job: the task's number, and the number of tasks where the scheduler tells it.
_ARRAYS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("PBS_ARRAY_INDEX", None),
    ("JOB_COMPLETION_INDEX", None),
)


class Range(NamedTuple):
    """The files from number `first` to `last - 1`, from offset `start` of the first file to offset `stop` of the last.

    `stop` is None for the end of the file. Offsets are those of `documents.Position`. The range has about `size` bytes of
    the files, and `before` bytes of the first file lie before it.
    """

    first: int
    start: int
    last: int
    stop: int | None
    before: int
    size: int


class _Border(NamedTuple):
    file: int = 0
    offset: int = 0
    size: int = 0  # approximate bytes of the file before the offset


def task_range(sources: Sources, tasks: int, task: int, divide: bool = True) -> Range:
    """Returns the range of number `task` of `tasks` ranges of about equal sizes, some possibly empty.

    With `divide`, a border may lie inside a file whose reader can begin there.
    """
    ends = [0.0, *accumulate(source.text_bytes_estimate for source in sources.files)]
    start, stop = (
        _border(sources, ends, ends[-1] * number / tasks, divide) if number < tasks else _Border(len(sources.files))
        for number in (task, task + 1)
    )
    size = sum(source.size for source in sources.files[start.file : stop.file]) + stop.size - start.size
    last = stop.file + 1 if stop.offset else stop.file
    return Range(start.file, start.offset, last, stop.offset or None, start.size, size)


def _border(sources: Sources, ends: list[float], wanted: float, divide: bool) -> _Border:
    """Returns a border near the estimated size `wanted` of the text before."""
    if not wanted:
        return _Border()
    number = min(bisect_right(ends, wanted) - 1, len(sources.files) - 1)
    if number < 0:
        return _Border()
    source = sources.files[number]
    share = (wanted - ends[number]) / max(1.0, source.text_bytes_estimate)
    row = next((row for row in READERS.values() if files.ends_in(source.path, row.suffixes)), None)
    if not divide or row is None or row.divide is None:
        return _Border(number + (share >= 0.5))
    offset = row.divide(source, min(1.0, share))
    if offset is None:
        return _Border(number + 1)
    return _Border(number, offset, int(share * source.size) if offset else 0)


def numbers_of_task(
    tasks: int | Literal["array"] | None, task: int | None, variables: Mapping[str, str] = os.environ
) -> tuple[int, int] | None:
    """Returns the number of tasks and this task's number, from 0; None for a call without tasks.

    What is missing is read from the variables of an array job of Slurm, PBS or Kubernetes. Raises `UserError` if a number
    is missing, or `task` is not from 0 to `tasks - 1`.
    """
    if tasks is None and task is None:
        return None
    index, count = next(((name, number) for name, number in _ARRAYS if name in variables), (None, None))
    if tasks is None or tasks == "array":
        if index is None or count is None or count not in variables:
            raise UserError("`tasks` is not known here: give the number of tasks (--tasks N)")
        if variables.get("SLURM_ARRAY_TASK_MIN", "0") != "0" or _last(variables) != int(variables[count]) - 1:
            raise UserError("the numbers of the array job are not 0, 1, ...: give the number of tasks (--tasks N)")
        tasks = int(variables[count])
    if task is None:
        if index is None:
            raise UserError(f"which of the {tasks} tasks is this? Give `task` (--task 0 to --task {tasks - 1})")
        task = int(variables[index])
    if tasks < 1:
        raise UserError(f"`tasks` must be at least 1, not {tasks}")
    if not 0 <= task < tasks:
        raise UserError(
            f"`task` is {task}, but {tasks} tasks have the numbers 0 to {tasks - 1}, as of an array job 0-{tasks - 1}"
        )
    return tasks, task


def _last(variables: Mapping[str, str]) -> int:
    return int(variables.get("SLURM_ARRAY_TASK_MAX", "-1"))
