"""Measures how long a device waits for collectives, and reports a wait that is too long.

`Work.wait` of NCCL, RCCL or oneCCL enqueues the wait on the device's stream, and the host continues. Events before and
after each wait show how long the device has waited.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

CollectiveCall = tuple[str, str, int]
"""The name under which the recorder counts a collective (see `Observer.begin`), the collective's name, and the
collective's number in this count."""
GRACE = 60.0  # seconds added to the timeout of process groups, except Gloo's, so that `Deadline` acts first


class StreamPoint(Protocol):
    """A recorded event of a stream."""

    def query(self) -> bool:
        """Returns whether the stream has reached this event."""

    def elapsed_time(self, end: Any) -> float:
        """Returns the milliseconds from this event to `end`."""


class _Wait(NamedTuple):
    collective: CollectiveCall
    before: StreamPoint
    after: StreamPoint


def _mark() -> torch.Event:
    event = torch.Event(torch.accelerator.current_accelerator(), enable_timing=True)
    event.record()
    return event


class DeviceWaits:
    """The waits that `passed` has not returned yet. `mark` records an event on the current stream, and returns the
    event."""

    def __init__(self, mark: Callable[[], StreamPoint] = _mark) -> None:
        self._mark = mark
        self._waits: list[_Wait] = []
        self._lock = threading.Lock()

    def wait(self, collective: CollectiveCall, works: Sequence[Any]) -> None:
        """Makes the current stream wait for each torch `Work` of `works`."""
        before = self._mark()
        for work in works:
            work.wait()
        with self._lock:
            self._waits.append(_Wait(collective, before, self._mark()))

    def passed(self) -> list[tuple[CollectiveCall, float]]:
        """Returns (collective, seconds) of each wait that has ended since the last call."""
        over: list[_Wait] = []
        under_way: list[_Wait] = []
        with self._lock:
            for wait in self._waits:
                (over if wait.after.query() else under_way).append(wait)
            self._waits = under_way
        return [(wait.collective, wait.before.elapsed_time(wait.after) / 1000) for wait in over]

    def waiting(self) -> CollectiveCall | None:
        """Returns the first collective that a stream of the device waits for now, or None."""
        with self._lock:
            return next(
                (wait.collective for wait in self._waits if wait.before.query() and not wait.after.query()),
                None,
            )


def flight_record() -> bytes:
    """Returns torch's flight record of this rank's last collectives as JSON, or `{}` if this torch has no recorder."""
    known = vars(torch._C._distributed_c10d)
    dump = known.get("_dump_nccl_trace_json") or known.get("_dump_fr_trace_json") or (lambda *_: b"{}")
    found: bytes = dump(True, False)
    return found


class Deadline:
    """A thread that calls `ended` once when the device has waited for one collective for more than `seconds`."""

    def __init__(self, waits: DeviceWaits, seconds: float, ended: Callable[[CollectiveCall], None]) -> None:
        self._waits, self._seconds, self._ended = waits, seconds, ended
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def stop(self) -> None:
        """Makes the thread end soon. The thread may still call `ended`."""
        self._stopped.set()

    def _watch(self) -> None:
        collective, since = None, time.monotonic()
        while not self._stopped.wait(min(1.0, self._seconds / 10)):
            now = self._waits.waiting()
            if now != collective:
                collective, since = now, time.monotonic()
            elif collective is not None and time.monotonic() - since > self._seconds:
                self._ended(collective)
                return
