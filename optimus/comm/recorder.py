"""What a rank is doing in collectives: how many it has begun with whom, which one it waits in, and how long it has waited.

When the ranks do not go on, the last collective of each says who keeps whom waiting; when one is slow, the others' waiting
says so. It costs two looks at the clock per collective.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Recorder:
    """The collectives of this rank. Groups are named by their ranks and, where there are several of the same, a tag."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.waiting: tuple[str, str, int] | None = None  # in which group, in what, the how manieth of the group
        self.seconds = 0.0  # waited in all
        self.by_kind: defaultdict[str, float] = defaultdict(
            float
        )  # seconds of them in each kind of collective; messages are one kind

    def begins(self, group: str) -> int:
        """A collective begins; returns its number in the group."""
        self.begun[group] += 1
        return self.begun[group]

    @contextmanager
    def waits(self, group: str, what: str, number: int) -> Iterator[None]:
        """This rank waits for a collective inside the context; threads beside the main one may always wait."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.waiting, began = (group, what, number), time.perf_counter()
        try:
            yield
        finally:
            waited = time.perf_counter() - began
            self.seconds += waited
            self.by_kind["message" if " to " in group or " of a message" in what else what] += waited
            self.waiting = None

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"begun": dict(self.begun), "waiting": self.waiting}
