"""Origin of NaN and Inf, found from sums of the tensors that each rank sends.

The origin is a rank that sent NaN or Inf before the rank received NaN or Inf.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

CollectiveId = tuple[str, int]
"""The name under which ranks count a collective (see `Observer.begin`), and the collective's number."""


# Types whose sums of many small elements may overflow, and the type for these sums.
_SUM_TYPES = {torch.float16: torch.float32}


class _Note(NamedTuple):
    """A tensor that this rank has sent, or a collective whose result this rank has received."""

    collective: CollectiveId | None
    sum: Tensor | None  # sum of the sent tensor; None for received tensors
    what: str


class Watch:
    """Records the sums of sent tensors and the receipt of results, in order, inside `on`."""

    def __init__(self) -> None:
        self.enabled = False  # False: no records, even inside `on`
        self._notes: list[_Note] = []  # several threads append records
        self._on = False

    def begin(self) -> None:
        """Forgets all records, at the beginning of a step."""
        self._notes = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Lets `record_sent` and `record_received` record inside the context, if `enabled`."""
        self._on = self.enabled
        try:
            yield
        finally:
            self._on = False

    def record_sent(self, tensor: Tensor, what: str, collective: CollectiveId | None = None) -> None:
        """Records the sum of `tensor`, which this rank is about to send. Skips tensors that are not floating-point."""
        if self._on and tensor.is_floating_point():
            # In general the sum has the tensor's dtype, since a sum in another dtype may copy the tensor.
            self._notes.append(_Note(collective, tensor.detach().sum(dtype=_SUM_TYPES.get(tensor.dtype)), what))

    def record_received(self, collective: CollectiveId) -> None:
        """Records that this rank has received the result of `collective`."""
        if self._on:
            self._notes.append(_Note(collective, None, ""))

    def spread(self) -> list[CollectiveId]:
        """Returns the collectives in which this rank sent NaN or Inf. Skips records without a `CollectiveId`."""
        return [note.collective for note in self._spoilt() if note.collective is not None]

    def origin(self, spread: Collection[CollectiveId]) -> str | None:
        """Returns the name of the operation in which this rank first sent NaN or Inf, or None if the rank is no origin.

        `spread` contains the collectives in which other ranks sent NaN or Inf.
        """
        spoilt = {id(note) for note in self._spoilt()}
        for note in self._notes:
            if id(note) in spoilt:
                return note.what
            if note.sum is None and note.collective in spread:
                return None
        return None

    def _spoilt(self) -> list[_Note]:
        """Returns the records of sent tensors whose sums are not finite."""
        sent = [(note, note.sum) for note in self._notes if note.sum is not None]
        if not sent:
            return []
        device = sent[0][1].device
        finite = torch.stack([torch.isfinite(each).to(device) for _, each in sent]).tolist()
        return [note for (note, _), fine in zip(sent, finite) if not fine]
