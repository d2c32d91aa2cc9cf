"""Who keeps the others waiting, when the ranks of a run do not go on (MegaScale, C4: the last collective of every rank)."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from optimus.comm.recorder import Recorder
from optimus.disk import parse_json

_GATHERING = 5.0  # seconds for all ranks to say where they are
_FOLDER = ".hang"


def meeting_place(run: Path, incarnation: str) -> Path:
    """Where the ranks of a run that hangs say where they are; `incarnation` is unique, so nobody reads an earlier one's."""
    return run / _FOLDER / incarnation


def clear(run: Path) -> None:
    """Remove what ranks that hung have said; none of them is asked any more."""
    shutil.rmtree(run / _FOLDER, ignore_errors=True)


class Verdict(NamedTuple):
    """The ranks at fault, and what the others wait in."""

    culprits: list[int]
    collective: str


def find_culprits(states: Mapping[int, Mapping[str, Any] | None]) -> Verdict:
    """Of the state of every rank's `Recorder` (None: it did not say anything), who keeps whom waiting.

    A rank that says nothing is at fault, or else one that waits in no collective while others do. Where all wait, or none
    does (with an accelerator the host goes ahead), it is who has begun fewest of the collectives that others wait in or
    have begun.
    """
    silent = [rank for rank, state in states.items() if state is None]
    waiting = {rank: state["waiting"] for rank, state in states.items() if state is not None and state["waiting"]}
    what = next(
        (f"{name} (number {number} of ranks {group})" for group, name, number in waiting.values()), "no collective"
    )
    if silent:  # most of them: it is who asks that nobody reaches any more
        return Verdict(silent if len(silent) <= len(states) / 2 else [], what)
    idle = [rank for rank in states if rank not in waiting]
    if idle and waiting:
        return Verdict(idle, what)
    behind: dict[int, int] = {}
    for rank, state in states.items():
        assert state is not None
        others = [other["begun"] for other in states.values() if other is not None]
        lacks = (max(begun.get(group, 0) for begun in others) - count for group, count in state["begun"].items())
        behind[rank] = max(lacks, default=0)
    most = max(behind.values())
    return Verdict([rank for rank, lack in behind.items() if lack == most] if most else [], what)


class Watchdog:
    """A thread that ends this rank when no step has been completed for `seconds`.

    `ended` is told the verdict, on every rank that can still say something, and must not return.
    """

    def __init__(
        self,
        recorder: Recorder,
        folder: Path,
        ranks: Sequence[int],
        rank: int,
        seconds: float,
        ended: Callable[[Verdict], None],
    ) -> None:
        self._recorder, self._folder, self._ranks, self._rank = recorder, folder, ranks, rank
        self._seconds, self._ended = seconds, ended
        self._stopped = threading.Event()
        self._last = time.monotonic()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def progress(self) -> None:
        """A step has been completed."""
        self._last = time.monotonic()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._seconds / 10)):
            if time.monotonic() - self._last > self._seconds:
                self._ended(find_culprits(self._gather()))
                return

    def _gather(self) -> dict[int, Any]:
        """The states of all ranks, by files in the run folder; None of those that do not write any in time."""
        with suppress(OSError):  # who cannot write, as its disk is full or it has been replaced, is silent
            self._folder.mkdir(parents=True, exist_ok=True)
            own = self._folder / f"{self._rank}.json"
            partial = own.with_suffix(".partial")
            partial.write_text(json.dumps(self._recorder.state()), encoding="utf-8")
            os.replace(partial, own)
        deadline = time.monotonic() + _GATHERING
        states: dict[int, Any] = dict.fromkeys(self._ranks)
        while None in states.values() and time.monotonic() < deadline:
            for rank in (rank for rank, state in states.items() if state is None):
                with suppress(OSError, ValueError):  # a file system may show a part of it first
                    states[rank] = parse_json((self._folder / f"{rank}.json").read_bytes())
            time.sleep(0.05)
        return states
