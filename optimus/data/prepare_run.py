"""One call of `prepare`: its arguments, its paths, and what it says of the disk."""

import errno
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from optimus.config.sizes import size_text
from optimus.data import files, shards
from optimus.data.contamination import NgramIndex
from optimus.data.documents import Position
from optimus.data.fields import CHAT, TextField
from optimus.data.files import BadFile
from optimus.data.helpers import Helpers
from optimus.data.inspection import listing
from optimus.data.ranges import Range
from optimus.data.selection import Selection
from optimus.data.tasks import task_name
from optimus.errors import UserError

Progress = Callable[[str, int, int | None], None]


@dataclass
class PrepareRun:
    """The arguments and the paths of one call of `prepare`."""

    sources: files.Sources
    output: Path
    partial: Path  # the unfinished folder
    workers: int
    train_tokenizer: int | None
    progress: Progress
    context: int
    seed: int
    shard_size: int
    text_field: str
    parse_special: bool
    pack: str
    encoding: str
    to: str
    selection: Selection
    excluded: NgramIndex | None  # the n-grams of the evaluation sets
    skip_bad: bool
    fields: TextField  # the parsed `text_field`
    memory: int  # for each of the `workers`
    helpers: Helpers
    range: Range
    task: tuple[int, int] | None  # number of tasks, and the number of this task
    bad: list[BadFile] = field(default_factory=list)
    inputs: files.Sources = field(init=False)  # the files of all tasks

    def __post_init__(self) -> None:
        self.inputs = self.sources
        self.sources = files.Sources(
            self.sources.inputs, self.sources.files[self.range.first : self.range.last], self.sources.skipped
        )

    @property
    def masked(self) -> bool:
        """True if `text_field` names conversations."""
        return self.text_field.startswith(CHAT)

    @property
    def tasks(self) -> int:
        return self.task[0] if self.task else 1

    @property
    def folder(self) -> Path:
        """The folder of the stream of this task."""
        return self.partial if self.task is None else self.partial / task_name(self.task[1])

    @property
    def folders(self) -> list[Path]:
        """The folders of the streams of all tasks."""
        return [self.partial] if self.task is None else [self.partial / task_name(k) for k in range(self.tasks)]

    @property
    def start(self) -> Position:
        """The position where this task begins to read. A beginning inside a file counts as its second line."""
        return Position(0, self.range.start, int(self.range.start > 0))

    @property
    def is_finished(self) -> bool:
        return (self.output / shards.INDEX).exists()

    def leave_out(self, bad: Sequence[tuple[files.Source, str]], partly: bool = False) -> None:
        """Removes the `bad` files from the sources. Raises `UserError` for bad files without `skip_bad`, or if no other
        file remains. `partly` is True if the check has read some files only in part."""
        total = len(self.sources.files) + len(self.bad)
        if bad and (not self.skip_bad or (len(bad) == len(self.sources.files) and self.task is None)):
            raise UserError(listing(bad, total, partly))
        excluded = [BadFile.from_source(*each) for each in bad]
        self.bad += excluded
        self.sources = self.sources.without((each.input, each.name) for each in excluded)


def refuse(run: PrepareRun, different: str) -> None:
    if different:
        raise UserError(
            f"{run.folder} holds an unfinished run with other settings ({different}). "
            "Delete it to start over, or choose another `output`."
        )


@contextmanager
def disk_errors(run: PrepareRun) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # a progress report raises this error, not a disk
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            path = Path(error.filename or run.partial)
            if isinstance(error, FileNotFoundError) and path.is_relative_to(run.partial):
                raise UserError(f"{path} is missing. Delete {path.parent} and run again.") from error
            raise UserError(
                f"cannot write {path}: {error.strerror or error}. Choose another `output`, or make it writable."
            ) from error
        raise UserError(
            f"disk full while writing {run.partial}. The progress is saved: free some space and run the same command "
            "again to continue."
        ) from error


def check_disk(run: PrepareRun, needed: float, folders: Sequence[Path]) -> None:
    """Raises `UserError` unless the disk has room for `needed` bytes, less the bytes that this run has already
    written."""
    missing = needed
    for path in [path for each in {run.partial, *folders} for path in each.iterdir()]:
        with suppress(FileNotFoundError):  # another task has renamed it
            missing -= path.stat().st_size
    check_free(run, missing, " (tokens, and as much again for the shards)")


def check_free(run: PrepareRun, missing: float, what: str = "") -> None:
    """Raises `UserError` unless the disk has `missing` free bytes, which `what` describes."""
    free = shutil.disk_usage(run.partial).free
    if missing > free:
        raise UserError(
            f"too little disk space for {run.output}: about {size_text(missing)} needed{what}, "
            f"{size_text(free)} free. Free some space, or choose an `output` on another disk."
        )


def empty(folder: Path, keep: Container[str]) -> None:
    """Deletes all that is in a folder, but for the names in `keep`."""
    for path in folder.iterdir():
        if path.name not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
