"""Shows the progress of a long operation: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from optimus.config.sizes import seconds_text
from optimus.observe.terminal import can_redraw, letting_go

_LINE_SECONDS = 10.0  # seconds between plain lines


def time_left(seconds: float, now: float) -> str:
    """Formats the remaining `seconds` and the time of the end, such as "about 12 min left, until 14:05"."""
    form = "%H:%M" if seconds < 43200 else "%Y-%m-%d %H:%M"
    return f"about {seconds_text(max(1.0, seconds))} left, until {time.strftime(form, time.localtime(now + seconds))}"


class ProgressBar:
    """Shows the progress of one or more stages.

    Unless a terminal can rewrite lines, a plain line appears at the end of a stage, and at updates after ten seconds of
    silence. With `every`, lines appear at multiples of `every` units instead of after silence.
    """

    def __init__(self, *, every: int | None = None) -> None:
        self._every = every
        self._bar: Any = None
        self._last_line = time.monotonic()
        self._began: dict[str, tuple[float, int]] = {}  # time and finished units at the first update of each stage
        self._on_terminal = can_redraw(sys.stderr.isatty())

    def update(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        """Shows that `done` of `total` units of `stage` are finished. `total` is None if unknown."""
        if self._on_terminal:
            with letting_go():
                self._bar_of(stage, total).show(done, total, note)
            return
        self._began.setdefault(stage, (time.monotonic(), done))
        silent = time.monotonic() - self._last_line
        if done == total or (silent > _LINE_SECONDS if self._every is None else done % self._every == 0):
            self._last_line = time.monotonic()
            share = f"{done:,}/{total:,}" if total else f"{done:,}"
            self.print(f"{stage}: {share} {note}".rstrip() + self._time_left(stage, done, total))

    def _bar_of(self, stage: str, total: int | None) -> Any:
        """Returns the bar of a stage, and closes the bar of an earlier stage."""
        if self._bar is None or self._bar.stage != stage:
            from optimus.observe.bar import Bar  # rich takes long to import

            self.close()
            self._bar = Bar(stage, total)
            self._bar.start()
        return self._bar

    def _time_left(self, stage: str, done: int, total: int | None) -> str:
        """Formats the remaining time; empty if unknown or at most ten seconds."""
        began, before = self._began[stage]
        if total is None or done == before:
            return ""
        seconds = (time.monotonic() - began) / (done - before) * (total - done)
        return f"  {time_left(seconds, time.time())}" if seconds > _LINE_SECONDS else ""

    def print(self, line: str) -> None:
        """Prints a line on standard error, above the bar if there is one."""
        with letting_go():
            if self._bar is not None:
                from rich.text import Text

                # rich would parse [words] in a plain string as markup. `soft_wrap` inserts no line breaks, so users can
                # copy a long line.
                self._bar.console.print(Text(line), soft_wrap=True)
            else:
                print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Closes the bar and restores the terminal."""
        if self._bar is not None:
            with letting_go():
                self._bar.stop()
            self._bar = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
