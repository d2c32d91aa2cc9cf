"""Handles of asynchronous work: a collective, a copy, an update."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def _nothing() -> None: ...


class Handle:
    """Asynchronous work that has begun; `wait` waits for its end."""

    def __init__(self, wait: Callable[[], None] = _nothing) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Returns when the work is done, or raises the work's exception, like the works of torch."""
        self._wait()


DONE = Handle()


class Result(Generic[T]):
    """Asynchronous work with a result, which `wait` returns."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self.wait = wait
