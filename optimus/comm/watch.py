"""Where numbers that are not finite come from: what leaves a rank and what comes to it, looked at in passing.

A faulty device gives NaN or Inf, and after the next collective every rank has them: tensor, expert and pipeline
parallelism reduce inside the forward pass. So each rank sums what it is about to send and what it has received, which costs
one pass over either and no synchronisation, and looks at the sums only when the step has gone wrong: a rank from which
something not finite left before anything not finite had come is where it began.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Watch:
    """The sums of what left and what came, in order, since `begin`; nothing is looked at outside of `on`."""

    def __init__(self) -> None:
        self.enabled = True  # whether anybody will ask
        # Sum, whether it left, in which collective; by several threads.
        self._noted: list[tuple[Tensor, bool, str]] = []
        self._on = False

    def begin(self) -> None:
        """Forget what was; a step begins."""
        self._noted = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Look at what leaves and comes inside the context."""
        self._on = self.enabled
        try:
            yield
        finally:
            self._on = False

    def leaves(self, tensor: Tensor, what: str) -> None:
        """`tensor` is about to be sent."""
        self._note(tensor, True, what)

    def comes(self, tensor: Tensor, what: str) -> None:
        """`tensor` has been received."""
        self._note(tensor, False, what)

    def origin(self) -> str | None:
        """In which collective something not finite left this rank before any had come; None if it did not."""
        if not self._noted:
            return None
        sums, left, what = zip(*self._noted)
        finite = torch.isfinite(torch.stack([each.to(sums[0].device, torch.float32) for each in sums])).tolist()
        return next((what[i] if left[i] else None for i, fine in enumerate(finite) if not fine), None)

    def _note(self, tensor: Tensor, left: bool, what: str) -> None:
        if self._on and tensor.is_floating_point():
            # In its own type: bf16 reaches as far as fp32, and another type would cost a copy of everything.
            self._noted.append((tensor.detach().sum(), left, what))
