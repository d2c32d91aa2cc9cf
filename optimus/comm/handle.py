"""What has been begun and is waited for later: a collective, a copy, an update."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def _nothing() -> None: ...


class Handle:
    """Something that has been begun; `wait` is called to wait for it."""

    def __init__(self, wait: Callable[[], None] = _nothing) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Returns when it is done, or raises what it has raised; as torch's works do."""
        self._wait()


DONE = Handle()


class Result(Generic[T]):
    """The same, of which `wait` returns what has come of it."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self.wait = wait
