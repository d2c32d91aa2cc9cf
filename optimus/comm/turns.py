"""Collectives one after the other, while something else goes on."""

from collections import deque
from collections.abc import Callable

from optimus.comm.group import Handle


class InTurn:
    """Collectives in turn: each begins when the one before has been waited for."""

    def __init__(self) -> None:
        self._starts: deque[Callable[[], Handle]] = deque()
        self._finish: Handle | None = None  # of the one under way

    def __bool__(self) -> bool:
        return self._finish is not None

    def add(self, start: Callable[[], Handle]) -> None:
        """Begin it when those before it are through: now, if there are none."""
        if self:
            self._starts.append(start)
        else:
            self._finish = start()

    def advance(self) -> None:
        """Wait for the one under way and begin the next."""
        if self._finish is not None:
            self._finish()
            self._finish = self._starts.popleft()() if self._starts else None

    def finish(self) -> None:
        """Wait for all."""
        while self:
            self.advance()
