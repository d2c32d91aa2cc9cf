"""Collectives one after the other, while something else goes on."""

from collections import deque
from collections.abc import Callable

from optimus.comm.handle import Handle


class InTurn(Handle):
    """Collectives in turn: each begins when the one before has been waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: deque[Callable[[], Handle]] = deque()
        self._under_way: Handle | None = None

    def __bool__(self) -> bool:
        return self._under_way is not None

    def add(self, start: Callable[[], Handle]) -> None:
        """Begin it when those before it are through: now, if there are none."""
        if self:
            self._starts.append(start)
        else:
            self._under_way = start()

    def advance(self) -> None:
        """Wait for the one under way and begin the next."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = self._starts.popleft()() if self._starts else None

    def wait(self) -> None:
        """Wait for all that there are."""
        while self:
            self.advance()
