"""Causal attention within concatenated documents.

Legend: T tokens of all documents, N heads, M heads of keys and values, D head size.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from optimus.kernels.attention import (
    PLAIN,
    AttentionBlock,
    Scoring,
    attend_blocks,
    blocks_of,
    capped,
    causal_attention,
    flash_fits,
)


class Documents:
    """The documents of a batch's concatenated sequences. Every sequence begins a new document.

    `lengths` are the documents' lengths in tokens, in order; `sequences` is the number of sequences.
    """

    def __init__(self, lengths: Sequence[int], sequences: int) -> None:
        self.lengths, self.sequences = lengths, sequences
        self._offsets: dict[torch.device, Tensor] = {}

    @cached_property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The pair (first token, end) of each document; the end is exclusive."""
        ends = list(accumulate(self.lengths))
        return list(zip([0, *ends], ends))

    @cached_property
    def longest(self) -> int:
        """Length of the longest document in tokens."""
        return max(self.lengths)

    def part(self, number: int, parts: int) -> "Documents":
        """Returns the documents of part `number` of `parts` equal parts of the sequences."""
        tokens, ends = sum(self.lengths) // parts, [end for _, end in self.spans]
        first, stop = (bisect_right(ends, number * tokens), bisect_right(ends, (number + 1) * tokens))
        return Documents(self.lengths[first:stop], self.sequences // parts)

    def positions(self) -> Tensor:
        """Returns the position of every token in its document, int64 [T] on the host."""
        starts = torch.tensor([start for start, _ in self.spans]).repeat_interleave(torch.tensor(self.lengths))
        return torch.arange(len(starts)) - starts

    def offsets(self, device: torch.device) -> Tensor:
        """Returns the index of each document's first token, then T; int32 [documents + 1], cached for each device."""
        if device not in self._offsets:
            self._offsets[device] = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)
        return self._offsets[device]


def document_attention(
    q_1TND: Tensor, k_1TMD: Tensor, v_1TMD: Tensor, documents: Documents, scoring: Scoring = PLAIN
) -> Tensor:
    """Computes causal attention of every token within its document; [1, T, N, D].

    N / M consecutive heads share keys and values.
    """
    window, cap, sink_N = scoring
    if documents.longest * len(documents.lengths) == q_1TND.shape[1]:
        q, k, v = (t[0].unflatten(0, (-1, documents.longest)) for t in (q_1TND, k_1TMD, v_1TMD))
        return causal_attention(q, k, v, scoring).flatten(0, 1)[None]
    plain = cap is None and sink_N is None
    if plain and flash_fits(q_1TND.transpose(1, 2), k_1TMD.transpose(1, 2), v_1TMD.transpose(1, 2), True):
        return _varlen(q_1TND[0], k_1TMD[0], v_1TMD[0], documents, window)[None]
    return attend_blocks(q_1TND, k_1TMD, v_1TMD, capped(_blocks(documents, window), cap), sink_N)


def _blocks(documents: Documents, window: int | None) -> Iterator[AttentionBlock]:
    for start, end in documents.spans:
        yield from (block.moved(start, start) for block in blocks_of(end - start, end - start, window))


def _varlen(q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor, documents: Documents, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # the import takes seconds

    offsets, longest = documents.offsets(q_TND.device), documents.longest
    before = -1 if window is None else window - 1  # number of earlier keys in the window; -1: no limit
    given = q_TND, k_TMD, v_TMD, offsets, offsets, longest, longest
    out_TND = varlen_attn(*given, window_size=(before, 0), enable_gqa=q_TND.shape[1] != k_TMD.shape[1])
    return cast(Tensor, out_TND)
