"""What a model trains on: sequences of tokens, and what is said of each of them.

Legend: B batch, S sequence.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Batch(NamedTuple):
    """Sequences of tokens. What is said of each token lies beside it, [B, S]; None says nothing special of any."""

    tokens_BS: Tensor  # int64
    target_mask_BS: Tensor | None = None
    """bool: the tokens that are predicted, by default all. The first of a sequence never is."""

    @classmethod
    def of(cls, given: "Tensor | Batch") -> "Batch":
        """A plain tensor of tokens as a batch; a batch as it is."""
        return given if isinstance(given, Batch) else cls(given)

    def split(self, sequences: int) -> list["Batch"]:
        """Batches of so many sequences; the last one has what is left."""
        parts = [slice(start, start + sequences) for start in range(0, len(self.tokens_BS), sequences)]
        mask_BS = self.target_mask_BS
        return [Batch(self.tokens_BS[part], None if mask_BS is None else mask_BS[part]) for part in parts]

    @property
    def target_BS(self) -> Tensor:
        """The token that is to be predicted after each one; -1 where none is."""
        target_BS = self.tokens_BS[:, 1:]
        if self.target_mask_BS is not None:
            target_BS = target_BS.masked_fill(~self.target_mask_BS[:, 1:], -1)
        return F.pad(target_BS, (0, 1), value=-1)

    def predicted(self) -> int:
        """How many tokens are predicted; with a mask, waits for the device."""
        if self.target_mask_BS is None:
            return self.tokens_BS[:, 1:].numel()
        return int(self.target_mask_BS[:, 1:].sum())
