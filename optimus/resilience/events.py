"""The event log of a run, `events.jsonl`."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from optimus.disk import read_json_lines

EventKind = Literal[
    "failure", "exclusion", "restart", "recovered", "rollback", "injected", "error", "stopped", "finished"
]


class EventLog:
    """The file `events.jsonl` of a run folder on a file system that all nodes share.

    `write` appends an event with one `write` system call, under a file lock if the file system has locks.
    """

    def __init__(self, run: str | Path) -> None:
        self.path = Path(run) / "events.jsonl"

    def write(
        self,
        kind: EventKind,
        *,
        node: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        seconds: float | None = None,
        detail: str = "",
    ) -> None:
        """Appends an event. `seconds` is the time since the failure."""
        event = {
            "time": time.time(),
            "kind": kind,
            "node": node,
            "rank": rank,
            "step": step,
            "seconds": seconds,
            "detail": detail,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            # A dying node may have left a partial line, which must not corrupt this event.
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            ends_with_newline = file.read(1) in (b"", b"\n")
            file.write((("" if ends_with_newline else "\n") + json.dumps(event) + "\n").encode())
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Returns the events so far. Skips lines that are not events."""
        records = read_json_lines(self.path) if self.path.exists() else []
        return [each for each in records if _is_event(each)]

    def unrecovered(self) -> list[dict[str, Any]]:
        """Returns the failures and rollbacks since the run last recovered or finished."""
        found: list[dict[str, Any]] = []
        for event in self.read():
            if event["kind"] in ("recovered", "finished"):
                found = []
            elif event["kind"] in ("failure", "rollback"):
                found.append(event)
        return found


def _is_event(record: Mapping[str, Any]) -> bool:
    seconds = record.get("seconds", "unsaid")
    numbers = [record.get("time"), 0.0 if seconds is None else seconds]
    usable = all(isinstance(each, int | float) and abs(each) <= sys.float_info.max for each in numbers)
    return usable and "step" in record and all(isinstance(record.get(name), str) for name in ("kind", "detail"))
