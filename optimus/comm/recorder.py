"""What a rank is doing in collectives: how many it has begun with whom, which one it waits in, and how long it has waited.

When the ranks do not go on, the last collective of each says who keeps whom waiting; when one is slow, the others' waiting
says so. It costs two looks at the clock per collective; where the device waits instead of the host, two events (`device`).
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from optimus.comm.device_waits import DeviceWaits, Place


class Recorder:
    """The collectives of this rank. Groups are named by their ranks and, where there are several of the same, a tag."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.waiting: Place | None = None
        self.device: DeviceWaits | None = None  # where the host does not wait itself
        self._seconds = 0.0
        self._by_kind: defaultdict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> float:
        """Waited in all, as far as is known."""
        self._take_in()
        return self._seconds

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds of them in each kind of collective; messages are one kind."""
        self._take_in()
        return dict(self._by_kind)

    def begins(self, group: str) -> int:
        """A collective begins; returns its number in the group."""
        self.begun[group] += 1
        return self.begun[group]

    @contextmanager
    def waits(self, group: str, what: str, number: int) -> Iterator[None]:
        """This rank waits for a collective inside the context; threads beside the training may always wait."""
        if _beside():
            yield
            return
        self.waiting, began = (group, what, number), time.perf_counter()
        try:
            yield
        finally:
            self._add(group, what, time.perf_counter() - began)
            self.waiting = None

    def wait(self, place: Place, works: Sequence[Any]) -> None:
        """Wait for the works of a collective, inside `waits`."""
        if self.device is not None and not _beside():
            self.device.wait(place, works)
            return
        for work in works:
            work.wait()

    def state(self) -> dict[str, Any]:
        """As JSON."""
        on_device = None if self.device is None else self.device.waiting()
        return {"begun": dict(self.begun), "waiting": on_device or self.waiting}

    def _take_in(self) -> None:
        for (group, what, _), seconds in [] if self.device is None else self.device.passed():
            self._add(group, what, seconds)

    def _add(self, group: str, what: str, seconds: float) -> None:
        self._seconds += seconds
        self._by_kind["message" if " to " in group or " of a message" in what else what] += seconds


def _beside() -> bool:
    """Whether this thread is one of ours beside the training: not the main one, nor autograd's, which are not Python's."""
    return type(threading.current_thread()) is threading.Thread
