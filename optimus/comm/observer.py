"""Observation of a group's collectives and messages."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.comm.handle import DONE, Handle
from optimus.comm.recorder import Recorder
from optimus.comm.watch import Watch
from optimus.errors import UserError
from optimus.step_context import region

Begin = Callable[[int], Any]
"""Begins the collective with this number; returns an object with `wait`, or a list of such objects."""


class CollectiveError(UserError):
    """Raised when the ranks fail to communicate. The ranks may be out of step, and must begin no further collective."""


class Observer:
    """Observes the group of `ranks`, of which this process is `ranks[rank]`.

    `tag` distinguishes groups of the same ranks. `gloo` is true if the backend is Gloo, whose failures are plain
    `RuntimeError`s.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, tag: int, recorder: Recorder, watch: Watch | None, gloo: bool = False
    ) -> None:
        self.recorder, self.watch = recorder, watch
        self._ranks, self._rank, self._gloo = ranks, rank, gloo
        self._tag = f" ({tag})" if tag else ""
        self.name = _few(ranks) + self._tag
        recorder.begun.setdefault(self.name, 0)  # so that a rank that has begun no collective counts as late

    def begin(
        self,
        what: str,
        tensor: Tensor,
        call: Begin,
        sent: Tensor | None = None,
        *,
        receives: bool = True,
        at: str | None = None,
    ) -> Handle:
        """Begins a collective or a message of `tensor` by `call`, and returns the handle.

        In a group of one rank, calls nothing.

        `sent` is the tensor that this rank sends, and `receives` is true if the rank receives data. `at` is the name
        under which the recorder counts the operation, by default the group's name.
        """
        if len(self._ranks) == 1:
            return DONE
        name = at or self.name
        number = self.recorder.begins(name)
        if self.watch is not None and sent is not None:
            self.watch.record_sent(sent, what, (name, number))
        # `call` may wait for a lock that Gloo's threads hold.
        with self._waits(name, what, number, tensor):
            started = call(number)
        works = started if isinstance(started, list) else [started]

        def wait() -> None:
            with self._waits(name, what, number, tensor):
                self.recorder.wait((name, what, number), works)
            if self.watch is not None and receives:
                self.watch.record_received((name, number))

        return Handle(wait)

    @contextmanager
    def talking(self, what: str) -> Iterator[None]:
        """Observes a collective of Python objects inside the context."""
        with self._waits(self.name, what, self.recorder.begins(self.name), torch.empty(0)):
            yield

    def between(self, source: int, target: int) -> str:
        """Returns the name (`at` of `begin`) for messages from rank `source` to rank `target` of the group."""
        return f"{self._ranks[source]} to {self._ranks[target]}{self._tag}"

    @contextmanager
    def _waits(self, name: str, what: str, number: int, tensor: Tensor) -> Iterator[None]:
        """Records a wait in a collective, and turns a failure that the backend reports into a `CollectiveError`.

        Errors of this rank's device pass unchanged.
        """
        try:
            with region(lambda: f"{what}, ranks {name}"), self.recorder.waits(name, what, number):
                yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            if not (self._gloo or isinstance(error, dist.DistError)):
                raise
            where = f"over ranks {_few(self._ranks)} failed on rank {self._ranks[self._rank]}"
            raise CollectiveError(f"{what} of {tensor.nbytes:,} bytes {where}: {cause_of(error)}") from error


def cause_of(error: RuntimeError) -> str:
    """Returns the first line of torch's message, without source location and advice.

    Returns the name of the error's type if the line is empty.
    """
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ?|\. This is typically.*$", "", line) or type(error).__name__


def _few(ranks: Sequence[int]) -> str:
    """Returns ranks as text, abbreviated if there are more than 8."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)} of them)"
