"""Record of a rank's collectives: the number begun in each group, the current wait, and the time waited."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from optimus.comm.device_waits import CollectiveCall, DeviceWaits


class Recorder:
    """Counts this rank's collectives by group, and messages by pair of ranks. Sums the seconds of waiting by kind."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.waiting: CollectiveCall | None = None
        self.device: DeviceWaits | None = None  # None if the host waits
        self._seconds = 0.0
        self._by_kind: defaultdict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> float:
        """Seconds of all recorded waits that have ended."""
        self._take_in()
        return self._seconds

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds that this rank has waited, by kind of collective; all messages are one kind."""
        self._take_in()
        return dict(self._by_kind)

    def begins(self, group: str) -> int:
        """Counts a collective that begins, and returns its number in the group."""
        self.begun[group] += 1
        return self.begun[group]

    @contextmanager
    def waits(self, group: str, what: str, number: int) -> Iterator[None]:
        """Records that this rank waits for a collective inside the context. Ignores waits of background threads."""
        if _beside():
            yield
            return
        self.waiting, began = (group, what, number), time.perf_counter()
        try:
            yield
        finally:
            self._add(group, what, time.perf_counter() - began)
            self.waiting = None

    def wait(self, collective: CollectiveCall, works: Sequence[Any]) -> None:
        """Calls `wait` of each torch `Work` of a collective. Call this method inside `waits`.

        Records the wait in `device`, if set, except in background threads.
        """
        if self.device is not None and not _beside():
            self.device.wait(collective, works)
            return
        for work in works:
            work.wait()

    def state(self) -> dict[str, Any]:
        """Returns the number of collectives begun in each group and the current wait, for JSON."""
        on_device = None if self.device is None else self.device.waiting()
        return {"begun": dict(self.begun), "waiting": on_device or self.waiting}

    def _take_in(self) -> None:
        for (group, what, _), seconds in [] if self.device is None else self.device.passed():
            self._add(group, what, seconds)

    def _add(self, group: str, what: str, seconds: float) -> None:
        self._seconds += seconds
        self._by_kind["message" if " to " in group or " of a message" in what else what] += seconds


def _beside() -> bool:
    """Returns whether this thread is a plain `threading.Thread`, as the library's background threads are.

    The main thread and autograd's threads have other types.
    """
    return type(threading.current_thread()) is threading.Thread
