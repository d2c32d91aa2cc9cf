"""Attribution of hangs to culprit ranks, from the collectives that every rank has begun (as in MegaScale and C4)."""

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

_GATHERING = 5.0  # seconds to wait for the reports of all ranks
_FOLDER = ".hang"


def report_folder(run: Path, incarnation: str) -> Path:
    """Returns the folder where the ranks of a hung run report their states.

    `incarnation` must be unique, so that no rank reads the reports of an earlier attempt.
    """
    return run / _FOLDER / incarnation


def clear(run: Path) -> None:
    """Removes the reports of earlier hangs, which no rank reads any more."""
    shutil.rmtree(run / _FOLDER, ignore_errors=True)


class Verdict(NamedTuple):
    """The culprit ranks, and a text about a collective in which a rank waits ("no collective" if no rank waits)."""

    culprits: list[int]
    collective: str


def find_culprits(states: Mapping[int, Mapping[str, Any] | None]) -> Verdict:
    """Finds the culprit ranks of a hang from the state of every rank's `Recorder` (None: the rank did not report).

    If some ranks, but at most half of all ranks, did not report, these ranks are the culprits; if more than half did
    not report, the verdict has no culprits. If all ranks reported, the culprits are the ranks that wait in no
    collective while others wait. If all ranks wait, or no rank waits, the culprits are the ranks with the largest lag.
    The lag of a rank in a group is the number of the group's collectives that another rank has begun and the lagging
    rank has not. A rank's lag is the largest of these numbers over the groups in which the rank has begun a collective.
    If no rank lags, the verdict has no culprits.
    """
    silent = [rank for rank, state in states.items() if state is None]
    waiting = {rank: state["waiting"] for rank, state in states.items() if state is not None and state["waiting"]}
    what = next(
        (f"{name} (number {number} of ranks {group})" for group, name, number in waiting.values()), "no collective"
    )
    if silent:  # if most ranks are silent, this rank itself is probably cut off
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
    """A thread that calls `ended` with the verdict when this rank has completed no step for more than `seconds`
    seconds.

    `ended` must end the process of this rank.
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
        """Notes that this rank has completed a step."""
        self._last = time.monotonic()

    def stop(self) -> None:
        """Stops the thread, unless the thread has already detected a hang."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._seconds / 10)):
            if time.monotonic() - self._last > self._seconds:
                self._ended(find_culprits(self._gather()))
                return

    def _gather(self) -> dict[int, Any]:
        """Exchanges the states of all ranks through files in the run folder. The state of a rank without a file is None
        after `_GATHERING` seconds."""
        with suppress(OSError):  # a rank that cannot write (full disk, or folder removed by a restart) stays silent
            self._folder.mkdir(parents=True, exist_ok=True)
            own = self._folder / f"{self._rank}.json"
            partial = own.with_suffix(".partial")
            partial.write_text(json.dumps(self._recorder.state()), encoding="utf-8")
            os.replace(partial, own)
        deadline = time.monotonic() + _GATHERING
        states: dict[int, Any] = dict.fromkeys(self._ranks)
        while None in states.values() and time.monotonic() < deadline:
            for rank in (rank for rank, state in states.items() if state is None):
                with suppress(OSError, ValueError):  # a shared file system may first show a partial file
                    states[rank] = parse_json((self._folder / f"{rank}.json").read_bytes())
            time.sleep(0.05)
        return states
