"""Updates that start only when waited for: code that reads state without a wait reads old values."""

import threading
from collections import deque
from collections.abc import Callable

import torch

from optimus.comm import Handle
from optimus.state.transfers import Job, Transfers


class LateTransfers(Transfers):
    """Transfers of a CPU that start an update when that update, or a later one, is waited for by any thread."""

    def __init__(self, device: torch.device, pinned: bool = True) -> None:
        super().__init__(device)
        self._queued: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    @property
    def under_way(self) -> int:
        """The number of updates that nobody has waited for yet."""
        return len(self._queued)

    def submit(self, work: Job, elements: int, on: str) -> Handle:
        given: list[Handle] = []
        right = super().submit
        self._queued.append(lambda: given.append(right(work, elements, on)))

        def wait() -> None:
            with self._lock:
                while not given:
                    self._queued.popleft()()
            given[0].wait()

        return Handle(wait)
