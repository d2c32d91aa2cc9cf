"""A backend of torch.distributed that behaves on CPUs as NCCL does when a rank is lost.

The backend wraps Gloo. As on a device, waiting for a collective returns at once and never raises; results are complete
when `synchronize` returns, which never happens if a peer is lost. A watchdog aborts the process.
"""

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from optimus.comm import device_waits

NAME = "silent"
LIBRARY = Path(__file__).resolve().parents[1]
# The path for programs whose ranks on CPUs use this backend.
PYTHONPATH = os.pathsep.join(map(str, [LIBRARY / "silent", LIBRARY]))
_POLL = 0.005  # seconds


class _Work:
    """A collective under way."""

    def __init__(self, inner: Any, stream: "Stream") -> None:
        self._inner, self._stream = inner, stream
        self.failed = False  # a peer is lost
        self.began = time.monotonic()

    def wait(self, *_: Any) -> bool:
        """Makes the device's stream wait."""
        self._stream.enqueue(self)
        if self._stream.blocking:
            self._stream.synchronize()
        return True

    def is_completed(self) -> bool:
        """Returns whether the collective is complete; a failed one never is."""
        if self.failed or not self._inner.is_completed():
            return False
        try:
            self._inner.wait()
        except RuntimeError:
            self.failed = True
        return not self.failed


class _Point:
    """An event, complete when all collectives before it are."""

    def __init__(self, works: Sequence[_Work]) -> None:
        self._works = works
        self.seen: float | None = None

    def query(self) -> bool:
        if self.seen is None and all(work.is_completed() for work in self._works):
            self.seen = time.monotonic()
        return self.seen is not None

    def elapsed_time(self, end: "_Point") -> float:
        assert self.query()
        assert end.query()
        return 1000 * max(0.0, end.seen - self.seen)  # type: ignore[operator]


class Stream:
    """The stream of a process. The watchdog aborts the process if a collective takes longer than `aborts` seconds, or
    `lost` seconds (by default equal) after the loss of a peer. A `blocking` stream makes the host wait."""

    def __init__(self, aborts: float, lost: float | None = None, *, blocking: bool = False) -> None:
        self.blocking = blocking
        self._aborts, self._lost = aborts, aborts if lost is None else lost
        self._watchdog: threading.Thread | None = None
        self._lock = threading.Lock()
        self._begun: list[_Work] = []
        self._told: list[_Work] = []  # collectives that the stream waits for
        self._points: list[_Point] = []

    def begin(self, inner: Any) -> _Work:
        """Starts a collective beside the stream."""
        work = _Work(inner, self)
        with self._lock:
            self._begun.append(work)
            if self._watchdog is None:
                self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._watchdog.start()
        return work

    def enqueue(self, work: _Work) -> None:
        """Makes later work on the stream wait for a collective."""
        with self._lock:
            self._told.append(work)

    def mark(self) -> _Point:
        """Records an event on the stream."""
        with self._lock:
            self._told = [work for work in self._told if not work.is_completed()]
            self._points.append(_Point(list(self._told)))
            return self._points[-1]

    def synchronize(self) -> None:
        """Makes the host wait for the device; forever if a peer is lost."""
        point = self.mark()
        while not point.query():
            time.sleep(_POLL)

    def _watch(self) -> None:
        while True:
            time.sleep(4 * _POLL)
            with self._lock:
                self._points = [point for point in self._points if not point.query()]
                self._begun = [work for work in self._begun if not work.is_completed()]
                now = time.monotonic()
                if any(now - work.began > (self._lost if work.failed else self._aborts) for work in self._begun):
                    os.abort()


def _begins(name: str) -> Any:
    """Returns a method that starts a collective, for torch to call."""

    def begin(self: "SilentGroup", *given: Any, **named: Any) -> _Work:
        return self.stream.begin(getattr(self.gloo, name)(*given, **named))

    return begin


class SilentGroup(dist.ProcessGroup):
    """A process group of this backend."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, stream: Stream) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.stream = stream

    def getBackendName(self) -> str:
        """Returns the backend's name for torch."""
        return NAME

    allreduce = _begins("allreduce")
    allgather = _begins("allgather")
    barrier = _begins("barrier")
    broadcast = _begins("broadcast")
    gather = _begins("gather")
    send = _begins("send")
    recv = _begins("recv")


def _register(stream: Stream) -> None:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> SilentGroup:
        return SilentGroup(store, rank, size, timeout, stream)

    dist.Backend.register_backend(NAME, make, devices=["cpu"])


def silent_group(ranks: Sequence[int], aborts: float) -> SilentGroup:
    """Returns a process group of this backend; all of `ranks` must call."""
    _register(Stream(aborts))
    made: SilentGroup = dist.new_group(list(ranks), backend=NAME)
    return made


class _HostWaits(device_waits.DeviceWaits):
    """Device waits that block the host as well, as reading a number does."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.mark)
        self._stream = stream

    def wait(self, collective: device_waits.CollectiveCall, works: Sequence[Any]) -> None:
        super().wait(collective, [SimpleNamespace(wait=partial(self._stream.enqueue, work)) for work in works])
        self._stream.synchronize()


def be_that_of_cpus() -> None:
    """Makes this backend the one for CPUs in this process, with a watchdog as quick as NCCL's after a peer's loss."""
    stream = Stream(60.0, lost=0.1, blocking=True)
    _register(stream)
    dist.Backend.default_device_backend_map["cpu"] = NAME
    device_waits.DeviceWaits = partial(_HostWaits, stream)  # type: ignore[assignment, misc]
