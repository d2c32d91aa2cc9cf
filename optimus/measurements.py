"""What was measured on this machine, and choices by it that are the same at every start.

A machine is never still: what takes two milliseconds now takes five beside another program. So things that are compared are
done in turn, and what disturbs one disturbs the others too; another than the default is chosen only where it is clearly
faster, by more than the measurements scatter; and what was measured once counts from then on. Free memory is rounded down
to a coarse step, and stays what it was before while that is still nearly so.
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

GAIN = 0.9  # what is chosen in place of the default takes less than this share of its time: chance must not choose
_ROUNDS, _MOST_ROUNDS = 5, 15
_ALIKE = 1.05  # the third best time of a thing, to its best, where the machine is quiet
_BITS = 5  # of free memory that count: steps of a sixteenth to a thirty-second
Name = TypeVar("Name", bound=str)


class Timing(NamedTuple):
    """Seconds of something that was done several times."""

    best: float
    usual: float  # the median

    @property
    def spread(self) -> float:
        """By how much the usual one is longer than the best, to the best."""
        return self.usual / self.best - 1


Timings = Mapping[str, Timing]


def in_turn(
    works: Mapping[Name, Callable[[], float]], rounds: int = _ROUNDS, most: int = _MOST_ROUNDS
) -> dict[Name, Timing]:
    """The timing of each of `works`, which returns its seconds: one after the other, in so many rounds and one before that
    does not count. More, where the best times are not alike, as they may all be disturbed ones."""
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
    """The fastest; but the `default` unless the other is usually clearly faster than the default at its best."""
    best = min(timings, key=lambda name: timings[name].usual)
    return best if timings[best].usual < GAIN * timings[default].best else default


def coarse(free: int, before: int = 0) -> int:
    """The bytes to count on where so many are free now: rounded down to a step.

    What was counted on `before` stays while it is there, and no more than two steps beside it, so that no reading is at a
    border.
    """
    if 0 < before <= free < before + 2 * _step(before):
        return before
    return free // _step(free) * _step(free)


def _step(size: int) -> int:
    return 1 << max(0, size.bit_length() - _BITS)


class Measurements:
    """Those of one chip, in a file; without a file nothing is kept.

    Any number of processes may use it at once: the file is replaced at once, and what is there counts. One that cannot be
    used, or written, is said in `notes` and does no harm: all is then measured again.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.notes: list[str] = []

    def timings(self) -> dict[str, dict[str, Timing]]:
        """By name, those of all alternatives."""
        return self._read()[0]

    def add(self, found: Mapping[str, Timings]) -> dict[str, dict[str, Timing]]:
        """Keep these; returns what holds of their names, which is what another process was first to keep."""
        with self._locked():
            known, free = self._read()
            new = {name: dict(each) for name, each in found.items() if known.get(name, {}).keys() != each.keys()}
            if new:
                self._write(known | new, free)
        return {name: (known | new)[name] for name in found}

    def free_memory(self, device: str, free: int) -> int:
        """`coarse`, after what was counted on before on this device."""
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
            self._note(f"{self.path} cannot be used ({type(error).__name__}: {error}): all is measured again")
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
                f"{self.path} cannot be written ({error.strerror}): the next run measures again (see tuning.cache)"
            )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Inside, no other process reads and writes; as far as the file system has locks."""
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
    """What a file holds. Raises one of the errors that `_read` knows where it holds anything else."""
    timings = {
        name: {label: Timing(float(best), float(usual)) for label, (best, usual) in each.items()}
        for name, each in raw["seconds"].items()
    }
    for each in timings.values():
        if not each or not all(0 < timing.best <= timing.usual < math.inf for timing in each.values()):
            raise ValueError("seconds must be above 0, and the best no longer than the usual ones")
    free = {device: int(each) for device, each in raw["free_memory"].items()}
    if min(free.values(), default=0) < 0:
        raise ValueError("free memory must not be below 0")
    return timings, free
