"""What NCCL does when a rank is lost, on CPUs: handles whose `wait` never raises, and a watchdog that aborts the process.

A backend of torch.distributed over Gloo. As with a device, to wait for a collective returns at once, and what it gives is
there only when `synchronize` returns, which it never does where a peer is lost.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

NAME = "silent"
_POLL = 0.005  # seconds


class _Work:
    """A collective that has been begun."""

    def __init__(self, inner: Any, stream: "list[_Work]") -> None:
        self._inner, self._stream = inner, stream
        self._failed = False
        self.began = time.monotonic()

    def wait(self, *_: Any) -> bool:
        """The device's stream waits."""
        self._stream.append(self)
        return True

    def is_completed(self) -> bool:
        """Never, where it has failed."""
        if self._failed or not self._inner.is_completed():
            return False
        try:
            self._inner.wait()
        except RuntimeError:
            self._failed = True
        return not self._failed


class _Point:
    """When all that had been begun was over."""

    def __init__(self, works: Sequence[_Work]) -> None:
        self._works = works
        self.seen: float | None = None

    def query(self) -> bool:
        if self.seen is None and all(work.is_completed() for work in self._works):
            self.seen = time.monotonic()
        return self.seen is not None

    def elapsed_time(self, end: "_Point") -> float:
        assert self.seen is not None
        assert end.seen is not None
        return 1000 * (end.seen - self.seen)


class SilentGroup(dist.ProcessGroup):
    """`aborts`: seconds after which the watchdog aborts a rank whose collective is not over."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, aborts: float) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._aborts = aborts
        self._works: list[_Work] = []
        self._stream: list[_Work] = []  # what it has been told to wait for
        self._points: list[_Point] = []
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return NAME

    def allreduce(self, *given: Any) -> _Work:  # type: ignore[override]
        """As torch begins one."""
        return self._begin(self._gloo.allreduce, *given)

    def send(self, *given: Any) -> _Work:  # type: ignore[override]
        """As torch begins one."""
        return self._begin(self._gloo.send, *given)

    def recv(self, *given: Any) -> _Work:  # type: ignore[override]
        """As torch begins one."""
        return self._begin(self._gloo.recv, *given)

    def mark(self) -> _Point:
        """A point on the stream, of which this process has one."""
        self._points.append(_Point(list(self._stream)))
        return self._points[-1]

    def synchronize(self) -> None:
        """The host waits for the device; for ever, where a peer is lost."""
        while not all(work.is_completed() for work in list(self._stream)):
            time.sleep(_POLL)

    def _begin(self, call: Callable[..., Any], *given: Any) -> _Work:
        self._works.append(_Work(call(*given), self._stream))
        return self._works[-1]

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL)
            for point in list(self._points):
                point.query()
            now = time.monotonic()
            if any(now - work.began > self._aborts and not work.is_completed() for work in list(self._works)):
                os.abort()


def silent_group(ranks: Sequence[int], aborts: float) -> SilentGroup:
    """A process group of this backend; all of `ranks` call."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> SilentGroup:
        return SilentGroup(store, rank, size, timeout, aborts)

    dist.Backend.register_backend(NAME, make, devices=["cpu"])
    made: SilentGroup = dist.new_group(list(ranks), backend=NAME)
    return made
