"""Attribution of hangs to culprit ranks, from each rank's record of collectives (as in MegaScale and C4)."""

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
    """Returns the folder where the ranks of a hung run report their states. Each start of
    the run must have another `incarnation`."""
    return run / _FOLDER / incarnation


def clear(run: Path) -> None:
    """Removes the reports of earlier hangs."""
    shutil.rmtree(run / _FOLDER, ignore_errors=True)


class Verdict(NamedTuple):
    """The culprit ranks of a hang. `collective` names a collective in which a rank waits, or is "no collective"."""

    culprits: list[int]
    collective: str


def find_culprits(states: Mapping[int, Mapping[str, Any] | None]) -> Verdict:
    """Finds the culprit ranks of a hang. `states` maps each rank to `Recorder.state()`, or to None without a report.

    If some ranks did not report, the culprits are these ranks, or no ranks if more than half did not report. If all
    ranks reported, the culprits are the ranks that wait in no collective while others wait.

    If all or no ranks wait, the function compares the numbers of collectives begun in each group, and of messages
    begun between each pair of ranks. The culprits are the ranks furthest behind, if any rank is behind. A rank that has
    begun no collective of a group does not count as behind in the group.
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
    others = [other["begun"] for other in states.values() if other is not None]
    messages = {name for begun in others for name in begun if " to " in name}
    for rank, state in states.items():
        assert state is not None
        # A rank that has not begun its first message to or from another rank has no count for these messages.
        own = dict.fromkeys((name for name in messages if rank in _ends(name)), 0) | state["begun"]
        lacks = (max(begun.get(group, 0) for begun in others) - count for group, count in own.items())
        behind[rank] = max(lacks, default=0)
    most = max(behind.values())
    return Verdict([rank for rank, lack in behind.items() if lack == most] if most else [], what)


def _ends(name: str) -> tuple[int, int]:
    """Returns the two ranks of messages with the name `name`; see `Observer.between`."""
    source, _, target = name.partition(" (")[0].partition(" to ")
    return int(source), int(target)


class Watchdog:
    """A thread that calls `ended` with the verdict when this rank has completed no step for `seconds` seconds.

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
        """Exchanges the states of all ranks through files in the run folder."""
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
