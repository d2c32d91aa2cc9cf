"""Waits of a device for collectives: to wait on the host for one of NCCL, RCCL or oneCCL is to tell the device's stream to.

The host goes ahead; it neither sees how long the device waits nor gets an error when another rank is lost. So an event
before and one after each wait say so: for how long ranks kept the device waiting, and in which collective it waits now. They
keep no tensor alive, as the backend's own handles do.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

Place = tuple[str, str, int]
"""In which group, in what, the how manieth of the group."""
GRACE = 60.0  # seconds after which the backend's own watchdog ends a rank that ours has not


class StreamPoint(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Whether the stream has come to it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this one to another, which the stream has come to as well."""


class _Wait(NamedTuple):
    place: Place
    before: StreamPoint
    after: StreamPoint


def _mark() -> torch.Event:
    event = torch.Event(torch.accelerator.current_accelerator(), enable_timing=True)
    event.record()
    return event


class DeviceWaits:
    """Those that this rank's streams have been told and have not passed, in order; `mark` makes a point on the stream."""

    def __init__(self, mark: Callable[[], StreamPoint] = _mark) -> None:
        self._mark = mark
        self._waits: list[_Wait] = []
        self._lock = threading.Lock()

    def wait(self, place: Place, works: Sequence[Any]) -> None:
        """Let the stream wait for `works`."""
        before = self._mark()
        for work in works:
            work.wait()
        with self._lock:
            self._waits.append(_Wait(place, before, self._mark()))

    def passed(self) -> list[tuple[Place, float]]:
        """Those that are over since this was asked last, and for how many seconds the device has waited."""
        over: list[_Wait] = []
        under_way: list[_Wait] = []
        with self._lock:
            for wait in self._waits:
                (over if wait.after.query() else under_way).append(wait)
            self._waits = under_way
        return [(wait.place, wait.before.elapsed_time(wait.after) / 1000) for wait in over]

    def waiting(self) -> Place | None:
        """What the device waits for now; None while it computes, or has nothing to do."""
        with self._lock:
            return next(
                (wait.place for wait in self._waits if wait.before.query() and not wait.after.query()),
                None,
            )


def flight_record() -> bytes:
    """What torch's flight recorder has of this rank's last collectives, as JSON; NCCL's own where torch is built with it."""
    known = vars(torch._C._distributed_c10d)
    found: bytes = known.get("_dump_nccl_trace_json", known["_dump_fr_trace_json"])(True, False)
    return found


class Deadline:
    """A thread that calls `ended` where the device has waited in one collective for `seconds`: its backend never raises."""

    def __init__(self, waits: DeviceWaits, seconds: float, ended: Callable[[Place], None]) -> None:
        self._waits, self._seconds, self._ended = waits, seconds, ended
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _watch(self) -> None:
        place, since = None, time.monotonic()
        while not self._stopped.wait(min(1.0, self._seconds / 10)):
            now = self._waits.waiting()
            if now != place:
                place, since = now, time.monotonic()
            elif place is not None and time.monotonic() - since > self._seconds:
                self._ended(place)
                return
