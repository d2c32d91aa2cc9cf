"""The sequences of a batch on one device.

Legend: B batch, S positions on this device, N heads, M heads of keys and values, D head size.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optimus.kernels.attention import PLAIN, Scoring, causal_attention
from optimus.kernels.documents import Documents, document_attention

if TYPE_CHECKING:
    from typing_extensions import Self  # `typing` has it from Python 3.11 on


class SequenceSplit:
    """Selects this device's positions, and computes attention. In this base class, the device has all positions."""

    parts: int = 1  # number of ranks that share each sequence

    def __init__(self, documents: Documents | None = None) -> None:
        self._documents = documents
        self._parts: dict[tuple[int, int], Self] = {}

    @property
    def documents(self) -> Documents | None:
        """The documents of the batch, None if each sequence is one document."""
        return self._documents

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns this device's positions in sequences of `length` tokens: int64 [length / parts], ascending."""
        return torch.arange(length, device=device)

    def attend(self, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """Computes causal attention of this device's positions: [B, S, N, D].

        With documents, B is 1, and dim S has the positions of all sequences, one sequence after the other.
        """
        if self._documents is None:
            return causal_attention(q_BSND, k_BSMD, v_BSMD, scoring)
        return document_attention(q_BSND, k_BSMD, v_BSMD, self._documents, scoring)

    def for_documents(self, documents: Documents) -> "Self":
        """Returns the same split with attention within each of `documents`."""
        return type(self)(documents)

    def part(self, number: int, parts: int) -> "Self":
        """Returns the same split for the sequences of part `number` of `parts` equal parts of the batch."""
        if self._documents is None:
            return self
        if (number, parts) not in self._parts:
            self._parts[number, parts] = self.for_documents(self._documents.part(number, parts))
        return self._parts[number, parts]
