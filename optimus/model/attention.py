"""Causal self-attention with rotary positions and, for OLMoE, a norm over all of q and all of k.

Legend: B batch, S sequence, N heads, D head size, H = N * D hidden, T = B * S tokens, P positions in the cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from optimus.kernels.attention import causal_attention
from optimus.kernels.rotary import rotary
from optimus.model.dense import RMSNorm
from optimus.model.linear import Linear
from optimus.model.parameters import Size
from optimus.model.parts import LOCAL, Parts
from optimus.model.sequence import Sequence


class LayerCache:
    """Keys and values of the positions seen so far, in one layer."""

    def __init__(self) -> None:
        self.k_BPND: Tensor | None = None
        self.v_BPND: Tensor | None = None

    def append(self, k_BSND: Tensor, v_BSND: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values up to and including these."""
        if self.k_BPND is not None and self.v_BPND is not None:
            k_BSND, v_BSND = torch.cat([self.k_BPND, k_BSND], 1), torch.cat([self.v_BPND, v_BSND], 1)
        self.k_BPND, self.v_BPND = k_BSND, v_BSND
        return k_BSND, v_BSND

    def keep(self, length: int) -> None:
        """Forget all positions but the first `length`."""
        if self.k_BPND is not None and self.v_BPND is not None:
            self.k_BPND, self.v_BPND = self.k_BPND[:, :length], self.v_BPND[:, :length]


class Places(NamedTuple):
    """Where the tokens of a batch stand: rotary tables (cos, sin) of their positions, and the sequences these are of."""

    cos_SD: Tensor
    sin_SD: Tensor
    sequence: Sequence
    position_T: Tensor  # of every token in its sequence


class Attention(nn.Module):
    """Multi-head attention; the weights of q, k and v are one parameter so that one product computes all three."""

    def __init__(self, hidden: int, heads: int, qk_norm_eps: float | None, parts: Parts = LOCAL) -> None:
        super().__init__()
        self.head_size = hidden // heads
        residual, columns = Size("residual", hidden), Size("heads", hidden)
        self.qkv = Linear(residual, Size("stack", 3), columns, parts=parts)
        self.out = Linear(columns, residual, parts=parts)
        self.q_norm = RMSNorm(columns, qk_norm_eps, parts) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(columns, qk_norm_eps, parts) if qk_norm_eps is not None else None

    @property
    def score_columns(self) -> int:
        """Columns that a token's scores are made of, and those that they weigh: queries and values of all heads."""
        return 2 * self.out.weight.shape[-1]

    def forward(self, x_TH: Tensor, places: Places, cache: LayerCache | None = None) -> Tensor:
        """[T, H]. The tokens are those of `places`, sequence by sequence; with a `cache` they continue what it holds."""
        q, k, v = self.qkv(x_TH).chunk(3, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(-1, len(places.cos_SD), t.shape[-1] // self.head_size, self.head_size) for t in (q, k, v))
        q, k = rotary(q, places[:2]), rotary(k, places[:2])
        attend = places.sequence.attend if cache is None else causal_attention
        y_BSND = attend(q, *((k, v) if cache is None else cache.append(k, v)))
        return self.out(y_BSND.flatten(2).flatten(0, 1))
