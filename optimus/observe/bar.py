"""The bar that `ProgressBar` shows on a terminal."""

import sys
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from optimus.config.sizes import count_text, seconds_text

_WITH_BAR = 70  # narrower terminals show the numbers without the bar
_WIDE = 100
_ECHO = 2  # empty columns at the end of the line, so that a terminal's echo of ^C does not wrap


class Bar(Progress):
    """The bar of one stage."""

    def __init__(self, stage: str, total: int | None) -> None:
        console = self._screen = Console(stderr=True, force_terminal=True)
        wide = console.width >= _WIDE
        bar = [BarColumn(bar_width=40 if wide else 10)] if console.width >= _WITH_BAR else []
        super().__init__(
            TextColumn("{task.description}"),
            *bar,
            _Count(Column(no_wrap=True)),
            _Note(),
            _Times(elapsed=wide),
            console=console,
            redirect_stdout=sys.stdout.isatty(),  # output to a file or a pipe must not go through rich
        )
        self.stage = stage
        self._task = self.add_task(stage, total=total, note="")

    def get_renderables(self) -> Iterator[RenderableType]:
        for each in super().get_renderables():
            yield Constrain(each, max(1, self._screen.width - _ECHO))

    def show(self, done: int, total: int | None, note: str) -> None:
        self.update(self._task, completed=done, total=total, note=note)


class _Count(ProgressColumn):
    """The count of units, such as 30/400."""

    def render(self, task: Task) -> Text:
        numbers = [int(task.completed)] + ([] if task.total is None else [int(task.total)])
        text = "/".join(f"{number:,}" if number < 1_000_000 else count_text(number) for number in numbers)
        return Text(text, style="progress.download")


class _Times(ProgressColumn):
    """Shows the elapsed time, the estimated time left, or both."""

    max_refresh = 0.5

    def __init__(self, *, elapsed: bool) -> None:
        super().__init__(Column(no_wrap=True))
        self._elapsed = elapsed

    def render(self, task: Task) -> Text:
        elapsed = task.finished_time if task.finished else task.elapsed
        parts = []
        if self._elapsed or task.finished or task.total is None:
            parts.append(f"{_seconds(elapsed)} elapsed")
        if not task.finished and task.total is not None:
            parts.append(f"{_seconds(task.time_remaining)} left")
        return Text(", ".join(parts), style="progress.remaining")


class _Note(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else seconds_text(round(seconds))
