"""What is noted of a group's collectives: who has begun how many and waits in which, what leaves and comes, what fails."""

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
"""Begins the collective of this number in its group: a work of torch's, a handle, or several."""


class CollectiveError(UserError):
    """A collective did not come to its end. The ranks are not in step any more: nothing collective can follow."""


class Observer:
    """Of the group of these `ranks`, of which this one is `ranks[rank]`; `tag` tells several of the same ranks apart.

    `gloo`: its backend raises nothing more special than `RuntimeError` for a peer that is lost or late.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, tag: int, recorder: Recorder, watch: Watch | None, gloo: bool = False
    ) -> None:
        self.recorder, self.watch = recorder, watch
        self._ranks, self._rank, self._gloo = ranks, rank, gloo
        self._tag = f" ({tag})" if tag else ""
        self.name = _few(ranks) + self._tag
        recorder.begun.setdefault(self.name, 0)  # who has begun none yet is behind those that have

    def begin(
        self,
        what: str,
        tensor: Tensor,
        call: Begin,
        leaves: Tensor | None = None,
        *,
        comes: bool = True,
        at: str | None = None,
    ) -> Handle:
        """Begin a collective of `tensor` by `call`. What `leaves`, whether something `comes`, and `at`: whom it is of, as
        the recorder knows it; else the group. A group of one has nothing to begin.

        The handle raises `CollectiveError`, which names it, where it fails on another rank.
        """
        if len(self._ranks) == 1:
            return DONE
        place = at or self.name
        number = self.recorder.begins(place)
        if self.watch is not None and leaves is not None:
            self.watch.leaves(leaves, what, (place, number))
        # To begin may be to wait: Gloo's threads and ours take turns.
        with self._waits(place, what, number, tensor):
            started = call(number)
        works = started if isinstance(started, list) else [started]

        def wait() -> None:
            with self._waits(place, what, number, tensor):
                self.recorder.wait((place, what, number), works)
            if self.watch is not None and comes:
                self.watch.comes((place, number))

        return Handle(wait)

    @contextmanager
    def talking(self, what: str) -> Iterator[None]:
        """A collective of Python objects inside."""
        with self._waits(self.name, what, self.recorder.begins(self.name), torch.empty(0)):
            yield

    def between(self, source: int, target: int) -> str:
        """The way of messages from one rank to another: both count those of theirs, and nobody else takes part."""
        return f"{self._ranks[source]} to {self._ranks[target]}{self._tag}"

    @contextmanager
    def _waits(self, place: str, what: str, number: int, tensor: Tensor) -> Iterator[None]:
        """In a collective, which is named where it fails; what fails on this rank's own device is no failure of others."""
        try:
            with region(lambda: what), self.recorder.waits(place, what, number):
                yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            if not (self._gloo or isinstance(error, dist.DistError)):
                raise
            where = f"over ranks {_few(self._ranks)} failed on rank {self._ranks[self._rank]}"
            raise CollectiveError(f"{what} of {tensor.nbytes:,} bytes {where}: {_cause(error)}") from error


def _cause(error: RuntimeError) -> str:
    """The first line of what torch says, without the place in its sources and the advice behind it."""
    line = str(error).strip().splitlines()[0]
    return re.sub(r"^\[[^]]*\] ?|\. This is typically.*$", "", line)


def _few(ranks: Sequence[int]) -> str:
    """Ranks as text: all of a few, the ends of many."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)} of them)"
