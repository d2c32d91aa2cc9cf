"""What a model trains on: sequences of tokens, and what is said of each of them.

Legend: B batch, S sequence.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.errors import UserError
from optimus.kernels.documents import Documents


def pinned(host: Tensor) -> Tensor:
    """A copy that an accelerator reads beside what it does; what lies elsewhere on the host waits until that is done."""
    return torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """The same on the device; from the host without waiting for it."""
    if x.device.type != "cpu" or device.type in ("cpu", "meta"):
        return x.to(device)
    return pinned(x).to(device, non_blocking=True)


class Batch(NamedTuple):
    """Sequences of tokens. What is said of each token lies beside it, [B, S]; None says nothing special of any."""

    tokens_BS: Tensor  # int64
    target_mask_BS: Tensor | None = None
    """bool: the tokens that are predicted, by default all. The first of a sequence never is."""

    document_BS: Tensor | None = None
    """int32 or int64: the number of the token's document, which does not decrease along a sequence; by default a sequence
    is one document. Attention stays inside of a document, its positions count from 0, and its first token is not predicted.
    Best on the host, as that is where its borders are read."""

    source_B: Tensor | None = None  # int64: the number of each sequence's source, where losses are asked for by source

    @classmethod
    def of(cls, given: "Tensor | Batch") -> "Batch":
        """A plain tensor of tokens as a batch; a batch as it is. Raises `UserError` where its documents do not fit."""
        batch = given if isinstance(given, Batch) else cls(given)
        if batch.document_BS is not None:
            _check_documents(batch.document_BS, batch.tokens_BS)
        return batch

    def split(self, sequences: int) -> list["Batch"]:
        """Batches of so many sequences; the last one has what is left."""
        parts = [slice(start, start + sequences) for start in range(0, len(self.tokens_BS), sequences)]
        return [Batch(*(None if each is None else each[part] for each in self)) for part in parts]  # type: ignore[arg-type]

    @property
    def target_BS(self) -> Tensor:
        """The token that is to be predicted after each one; -1 where none is."""
        target_BS, chosen_BS = self.tokens_BS[:, 1:], self._chosen_BS
        if chosen_BS is not None:
            target_BS = target_BS.masked_fill(~moved(chosen_BS, target_BS.device), -1)
        return F.pad(target_BS, (0, 1), value=-1)

    @property
    def counted_by_shape(self) -> bool:
        """Whether every batch of this shape has as many predicted tokens."""
        return self.target_mask_BS is None and self.document_BS is None

    def predicted(self) -> int:
        """How many tokens are predicted; with a mask, waits for the device."""
        chosen_BS = self._chosen_BS
        return self.tokens_BS[:, 1:].numel() if chosen_BS is None else int(chosen_BS.sum())

    @property
    def _chosen_BS(self) -> Tensor | None:
        """Which tokens after the first are predicted [B, S - 1]; None: all."""
        mask_BS = None if self.target_mask_BS is None else self.target_mask_BS[:, 1:]
        if self.document_BS is None:
            return mask_BS
        inside_BS = self.document_BS[:, 1:] == self.document_BS[:, :-1]
        return inside_BS if mask_BS is None else mask_BS & moved(inside_BS, mask_BS.device)

    def documents(self) -> Documents | None:
        """The documents, of which there is one per sequence where None."""
        if self.document_BS is None:
            return None
        first_BS = torch.ones(self.document_BS.shape, dtype=torch.bool)
        first_BS[:, 1:] = self.document_BS[:, 1:] != self.document_BS[:, :-1]
        starts = first_BS.flatten().nonzero().flatten().tolist()
        ends = [*starts[1:], first_BS.numel()]
        return Documents([end - start for start, end in zip(starts, ends)], len(first_BS))


def _check_documents(document_BS: Tensor, tokens_BS: Tensor) -> None:
    if document_BS.shape != tokens_BS.shape:
        raise UserError(
            f"`document_BS` is {list(document_BS.shape)}, but the tokens are {list(tokens_BS.shape)}: give every token the "
            "number of its document"
        )
    if document_BS.dtype not in (torch.int32, torch.int64):
        raise UserError(f"`document_BS` is {document_BS.dtype}: give numbers of documents as int32 or int64")
    falls = (document_BS[:, 1:] < document_BS[:, :-1]).nonzero()
    if len(falls):
        row, at = falls[0].tolist()
        before, after = document_BS[row, at : at + 2].tolist()
        raise UserError(
            f"`document_BS` falls from {before} to {after} at token {at + 1} of sequence {row}: the numbers of documents "
            "must not decrease along a sequence"
        )
