"""How the sequences of a batch lie: on one device, which has all of every sequence. `parallel.context` has other ways.

Legend: B batch, S positions on this device, N heads, M heads of keys and values, D head size.
"""

from typing import Self

import torch
from torch import Tensor

from optimus.kernels.attention import PLAIN, Scoring, causal_attention
from optimus.kernels.documents import Documents, document_attention


class SequenceSplit:
    """Which positions of every sequence are here, and how they attend to those that are not; here all are."""

    parts: int = 1  # the sequences are divided into; each has the same number of positions

    def __init__(self, documents: Documents | None = None) -> None:
        self._documents = documents

    def positions(self, length: int, device: torch.device) -> Tensor:
        """int64 [length / parts], increasing: those of this device, of sequences of `length`."""
        return torch.arange(length, device=device)

    def attend(self, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """Causal softmax attention of these positions over all up to their own; [B, S, N, D].

        Within documents, B is 1 and S are the positions of all sequences, one sequence after the other.
        """
        if self._documents is None:
            return causal_attention(q_BSND, k_BSMD, v_BSMD, scoring)
        return document_attention(q_BSND, k_BSMD, v_BSMD, self._documents, scoring)

    def within(self, documents: Documents) -> Self:
        """The same positions of a batch of `documents`, in which attention stays inside of each."""
        return type(self)(documents)
