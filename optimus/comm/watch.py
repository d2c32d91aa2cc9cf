"""Where numbers that are not finite come from: what leaves a rank, looked at in passing.

A faulty device gives NaN or Inf, and after the next collective every rank has them: tensor, expert and pipeline
parallelism reduce inside the forward pass. So each rank sums what it is about to send, which costs one pass over it and no
synchronisation, and looks at the sums only when the step has gone wrong. The ranks then tell each other in which
collectives they have spread what is not finite: a rank from which it left before any had come from another is where it
began.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

CollectiveId = tuple[str, int]
"""A collective: among whom, and the how manieth of theirs. All who take part name it alike."""


class _Note(NamedTuple):
    """Something left in a collective, or has come by it."""

    place: CollectiveId | None
    sum: Tensor | None  # of what left
    what: str


class Watch:
    """What left and what came, in order, since `begin`; nothing is noted outside of `on`."""

    def __init__(self) -> None:
        self.enabled = False  # whether anybody will ask
        self._notes: list[_Note] = []  # by several threads
        self._on = False

    def begin(self) -> None:
        """Forget what was; a step begins."""
        self._notes = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note what leaves and comes inside the context."""
        self._on = self.enabled
        try:
            yield
        finally:
            self._on = False

    def leaves(self, tensor: Tensor, what: str, place: CollectiveId | None = None) -> None:
        """`tensor` is about to be sent."""
        if self._on and tensor.is_floating_point():
            # In its own type: bf16 reaches as far as fp32, and another type would cost a copy of everything.
            self._notes.append(_Note(place, tensor.detach().sum(), what))

    def comes(self, place: CollectiveId) -> None:
        """What the others sent has been received."""
        if self._on:
            self._notes.append(_Note(place, None, ""))

    def spread(self) -> list[CollectiveId]:
        """The collectives to which this rank gave something not finite."""
        return [note.place for note in self._spoilt() if note.place is not None]

    def origin(self, spread: Collection[CollectiveId]) -> str | None:
        """In which collective something not finite left this rank before any had come; None if it did not.

        `spread` are the collectives to which other ranks gave something not finite.
        """
        spoilt = {id(note) for note in self._spoilt()}
        for note in self._notes:
            if id(note) in spoilt:
                return note.what
            if note.sum is None and note.place in spread:
                return None
        return None

    def _spoilt(self) -> list[_Note]:
        """What left and was not finite."""
        left = [(note, note.sum) for note in self._notes if note.sum is not None]
        if not left:
            return []
        device = left[0][1].device
        finite = torch.isfinite(torch.stack([each.to(device, torch.float32) for _, each in left])).tolist()
        return [note for (note, _), fine in zip(left, finite) if not fine]
