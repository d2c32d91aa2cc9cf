"""How the sequences of a batch lie: the interface, and its form on one device, which has all of every sequence.

Legend: B batch, S positions on this device, N heads, D head size.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Sequence(Protocol):
    """Which positions of every sequence are here, and how they attend to those that are not."""

    parts: int  # the sequences are divided into; each has the same number of positions

    def positions(self, length: int, device: torch.device) -> Tensor:
        """int64 [length / parts], increasing: those of this device, of sequences of `length`."""

    def attend(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor) -> Tensor:
        """Causal softmax attention of these positions over all up to their own, [B, S, N, D]."""


class WholeSequence:
    """Every position is here."""

    parts = 1

    def positions(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)

    def attend(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor) -> Tensor:
        return causal_attention(q_BSND, k_BSND, v_BSND)


def causal_attention(q_BSND: Tensor, k_BPND: Tensor, v_BPND: Tensor) -> Tensor:
    """Softmax attention of the last S of P positions over all positions up to their own."""
    q, k, v = (t.transpose(1, 2) for t in (q_BSND, k_BPND, v_BPND))
    new, seen = q.shape[2], k.shape[2]
    if new == seen:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(1, 2)
