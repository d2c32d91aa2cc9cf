"""Handles of asynchronous operations."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def _nothing() -> None: ...


class Handle:
    """An asynchronous operation that has begun; `wait` waits for its end."""

    def __init__(self, wait: Callable[[], None] = _nothing) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Waits for the operation, and raises the operation's exception.

        On a device, the call may only make the current stream wait, like `Work.wait` of torch.
        """
        self._wait()


DONE = Handle()


class Result(Generic[T]):
    """An asynchronous operation with a result, which `wait` returns."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self.wait = wait
