"""Measurements on this machine, and choices between alternatives.

`in_turn` times alternatives in turn, because other programs disturb measurements.
"""

import bisect
import fcntl
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from optimus.disk import parse_json, write_json

GAIN = 0.9  # an alternative's median time must be less than this share of the default's best time
_ROUNDS, _MOST_ROUNDS = 5, 15
_ALIKE = 1.05  # maximum ratio of the third best time to the best on a machine without disturbance
_BITS = 5  # significant bits of free memory
Name = TypeVar("Name", bound=str)


class Timing(NamedTuple):
    """The seconds of an operation that was timed several times."""

    best: float
    usual: float  # the median

    @property
    def spread(self) -> float:
        """The excess of the median over the best time, relative to the best."""
        return self.usual / self.best - 1


Timings = Mapping[str, Timing]


def in_turn(
    works: Mapping[Name, Callable[[], float]], rounds: int = _ROUNDS, most: int = _MOST_ROUNDS
) -> dict[Name, Timing]:
    """Times the functions `works`, which return their seconds, in turn for `rounds` rounds after a warm-up round.

    Adds rounds, up to `most`, while the times show a disturbance.
    """
    for work in works.values():
        work()
    seconds: dict[Name, list[float]] = {name: [] for name in works}
    while len(next(iter(seconds.values()))) < (most if _disturbed(seconds.values()) else rounds):
        for name, work in works.items():
            bisect.insort(seconds[name], work())
    return {name: Timing(each[0], median(each)) for name, each in seconds.items()}


def _disturbed(samples: Iterable[Sequence[float]]) -> bool:
    return any(len(each) > 2 and each[2] > _ALIKE * each[0] for each in samples)


def clear_choice(default: Name, timings: Mapping[Name, Timing]) -> Name:
    """Returns the alternative with the lowest median if this median is less than `GAIN` times the default's best time,
    else `default`."""
    best = min(timings, key=lambda name: timings[name].usual)
    return best if timings[best].usual < GAIN * timings[default].best else default


def coarse(free: int, before: int = 0) -> int:
    """Rounds `free` down to a multiple of a step that grows with `free`.

    Returns a positive `before` instead while `before` <= `free` < `before` + 2 steps (the step of `before`).
    """
    if 0 < before <= free < before + 2 * _step(before):
        return before
    return free // _step(free) * _step(free)


def _step(size: int) -> int:
    return 1 << max(0, size.bit_length() - _BITS)


class Measurements:
    """The measurements of one chip, saved in a file if `path` is given.

    Several processes may use the file at once.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.notes: list[str] = []

    def timings(self) -> dict[str, dict[str, Timing]]:
        """Returns the saved timings, by measurement and by alternative."""
        return self._read()[0]

    def add(self, found: Mapping[str, Timings]) -> dict[str, dict[str, Timing]]:
        """Saves each measurement in `found` unless the file has a measurement of the same name and alternatives.

        Returns, for each name in `found`, the file's timings in that case, else the new timings.
        """
        with self._locked():
            known, free = self._read()
            new = {name: dict(each) for name, each in found.items() if known.get(name, {}).keys() != each.keys()}
            if new:
                self._write(known | new, free)
        return {name: (known | new)[name] for name in found}

    def free_memory(self, device: str, free: int) -> int:
        """Returns and saves the result of `coarse` for `free` bytes and the device's saved value."""
        with self._locked():
            timings, known = self._read()
            counted = coarse(free, known.get(device, 0))
            if counted != known.get(device):
                self._write(timings, known | {device: counted})
        return counted

    def _read(self) -> tuple[dict[str, dict[str, Timing]], dict[str, int]]:
        if self.path is None:
            return {}, {}
        try:
            return _checked(parse_json(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            self._note(
                f"{self.path} cannot be used ({type(error).__name__}: {error}): this run repeats all measurements"
            )
            return {}, {}

    def _write(self, timings: Mapping[str, Timings], free: Mapping[str, int]) -> None:
        if self.path is None:
            return
        try:
            write_json(self.path, {"seconds": timings, "free_memory": free})
        except OSError as error:
            with suppress(OSError):
                self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp").unlink()
            self._note(
                f"{self.path} cannot be written ({error.strerror}): the next run repeats the measurements (see tuning.cache)"
            )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds a lock on the file's folder during the block, if the file system supports locks."""
        folder = None
        with suppress(OSError):
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                folder = os.open(self.path.parent, os.O_RDONLY)
                fcntl.flock(folder, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if folder is not None:
                os.close(folder)


def _checked(raw: Any) -> tuple[dict[str, dict[str, Timing]], dict[str, int]]:
    """Returns the timings and the free memory in a file's contents."""
    timings = {
        name: {label: Timing(float(best), float(usual)) for label, (best, usual) in each.items()}
        for name, each in raw["seconds"].items()
    }
    for each in timings.values():
        if not each or not all(0 < timing.best <= timing.usual < math.inf for timing in each.values()):
            raise ValueError("seconds must be above 0, and the best time at most the median")
    free = {device: int(each) for device, each in raw["free_memory"].items()}
    if min(free.values(), default=0) < 0:
        raise ValueError("free memory must not be below 0")
    return timings, free
