"""Origin of NaN and Inf, found from sums of the tensors that each rank sends.

Collectives spread the NaN or Inf of a faulty device to other ranks. Inside `Watch.on`, each rank therefore sums the
floating-point tensors that it is about to send over watched groups. The ranks read the sums after a step whose loss or
gradient norm is not finite. The ranks then tell each other in which collectives they have sent NaN or Inf. The origin
is a rank that sent NaN or Inf before it received NaN or Inf.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

CollectiveId = tuple[str, int]
"""A collective: the name under which ranks count it (see `Observer.begin`), and its number."""


class _Note(NamedTuple):
    """A tensor that this rank has sent in a collective, or a collective whose result this rank has received."""

    collective: CollectiveId | None
    sum: Tensor | None  # sum of the sent tensor; None for received tensors
    what: str


class Watch:
    """Records sent and received tensors since `begin`, in order, but only inside `on`."""

    def __init__(self) -> None:
        self.enabled = False  # True if `on` records tensors
        self._notes: list[_Note] = []  # several threads append records
        self._on = False

    def begin(self) -> None:
        """Forgets all records, at the beginning of a step."""
        self._notes = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Records sent and received tensors inside the context, if `enabled`."""
        self._on = self.enabled
        try:
            yield
        finally:
            self._on = False

    def record_sent(self, tensor: Tensor, what: str, collective: CollectiveId | None = None) -> None:
        """Records the sum of a floating-point `tensor`, which this rank is about to send."""
        if self._on and tensor.is_floating_point():
            # The sum has the tensor's type: bf16 has the range of fp32, and another type would cost a copy of the tensor.
            self._notes.append(_Note(collective, tensor.detach().sum(), what))

    def record_received(self, collective: CollectiveId) -> None:
        """Records that this rank has received the result of `collective`."""
        if self._on:
            self._notes.append(_Note(collective, None, ""))

    def spread(self) -> list[CollectiveId]:
        """Returns the collectives in which this rank sent NaN or Inf.

        Leaves out tensors that were recorded without a `CollectiveId`, like the gradients of a reduction.
        """
        return [note.collective for note in self._spoilt() if note.collective is not None]

    def origin(self, spread: Collection[CollectiveId]) -> str | None:
        """Returns the name of the collective in which this rank first sent NaN or Inf.

        Returns None if this rank sent no NaN or Inf, or received the result of a collective of `spread` before it first
        sent NaN or Inf. `spread` contains the collectives in which other ranks sent NaN or Inf.
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
        finite = torch.isfinite(torch.stack([each.to(device, torch.float32) for _, each in sent])).tolist()
        return [note for (note, _), fine in zip(sent, finite) if not fine]
