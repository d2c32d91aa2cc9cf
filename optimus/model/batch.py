"""Training batches.

Legend: B batch, S sequence.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.errors import UserError
from optimus.kernels.documents import Documents


def pinned(host: Tensor) -> Tensor:
    """Returns a copy of `host` in pinned memory."""
    return torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Returns `x` on `device`. The copy from the host to an accelerator is asynchronous."""
    if x.device.type != "cpu" or device.type in ("cpu", "meta"):
        return x.to(device)
    return pinned(x).to(device, non_blocking=True)


class Batch(NamedTuple):
    """Sequences of tokens, with optional tensors that describe each token or sequence."""

    tokens_BS: Tensor  # int64
    target_mask_BS: Tensor | None = None
    """bool: True for the tokens to predict, by default all. The first token of a sequence is not predicted."""

    document_BS: Tensor | None = None
    """int32 or int64, on the host: the number of each token's document. The numbers must not decrease along a
    sequence. Attention stays within a document; each document's positions begin at 0, and its first token is not
    predicted."""

    source_B: Tensor | None = None  # int64: the number of each sequence's data source

    @classmethod
    def wrap(cls, inputs: "Tensor | Batch") -> "Batch":
        """Returns a `Batch` unchanged, and wraps a tensor of tokens. Raises `UserError` if `document_BS` is invalid."""
        batch = inputs if isinstance(inputs, Batch) else cls(inputs)
        if batch.document_BS is not None:
            _check_documents(batch.document_BS, batch.tokens_BS)
        return batch

    def split(self, sequences: int) -> list["Batch"]:
        """Returns batches of `sequences` sequences each; the last batch may have fewer."""
        parts = [slice(start, start + sequences) for start in range(0, len(self.tokens_BS), sequences)]
        return [Batch(*(None if each is None else each[part] for each in self)) for part in parts]  # type: ignore[arg-type]

    @property
    def target_BS(self) -> Tensor:
        """The token to predict after each token; -1 where no token is predicted."""
        target_BS, chosen_BS = self.tokens_BS[:, 1:], self._chosen_BS
        if chosen_BS is not None:
            target_BS = target_BS.masked_fill(~moved(chosen_BS, target_BS.device), -1)
        return F.pad(target_BS, (0, 1), value=-1)

    @property
    def counted_by_shape(self) -> bool:
        """True if the shape alone determines the number of predicted tokens."""
        return self.target_mask_BS is None and self.document_BS is None

    def predicted(self) -> int:
        """Returns the number of predicted tokens. The host waits for a mask on an accelerator."""
        chosen_BS = self._chosen_BS
        return self.tokens_BS[:, 1:].numel() if chosen_BS is None else int(chosen_BS.sum())

    @property
    def _chosen_BS(self) -> Tensor | None:
        """Mask [B, S - 1] of each sequence's tokens after the first, True if predicted; None if `counted_by_shape`."""
        mask_BS = None if self.target_mask_BS is None else self.target_mask_BS[:, 1:]
        if self.document_BS is None:
            return mask_BS
        inside_BS = self.document_BS[:, 1:] == self.document_BS[:, :-1]
        return inside_BS if mask_BS is None else mask_BS & moved(inside_BS, mask_BS.device)

    def documents(self) -> Documents | None:
        """Returns the batch's documents, or None without `document_BS`."""
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
            f"`document_BS` has shape {list(document_BS.shape)}, but the tokens have shape {list(tokens_BS.shape)}: give "
            "every token the number of its document"
        )
    if document_BS.dtype not in (torch.int32, torch.int64):
        raise UserError(f"`document_BS` has dtype {document_BS.dtype}: give the numbers of documents as int32 or int64")
    falls = (document_BS[:, 1:] < document_BS[:, :-1]).nonzero()
    if len(falls):
        row, at = falls[0].tolist()
        before, after = document_BS[row, at : at + 2].tolist()
        raise UserError(
            f"`document_BS` falls from {before} to {after} at token {at + 1} of sequence {row}: the numbers of documents "
            "must not decrease along a sequence"
        )
