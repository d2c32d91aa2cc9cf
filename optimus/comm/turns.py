"""A queue of asynchronous operations."""

from collections import deque
from collections.abc import Callable

from optimus.comm.handle import Handle


class InTurn(Handle):
    """A queue of asynchronous operations, which run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: deque[Callable[[], Handle]] = deque()
        self._under_way: Handle | None = None

    def __bool__(self) -> bool:
        return self._under_way is not None

    def add(self, start: Callable[[], Handle]) -> None:
        """Begins an operation if no other operation is under way, and otherwise enqueues the operation."""
        if self:
            self._starts.append(start)
        else:
            self._under_way = start()

    def advance(self) -> None:
        """Waits for the operation under way, if any, and begins the next operation of the queue."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = self._starts.popleft()() if self._starts else None

    def begin_last(self) -> None:
        """Waits for all operations of the queue except the last, which is then under way."""
        while self._starts:
            self.advance()

    def wait(self) -> None:
        """Waits for all operations of the queue."""
        while self:
            self.advance()
