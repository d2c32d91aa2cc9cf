"""Causal self-attention with rotary positions and, for OLMoE, a norm over all of q and all of k.

Legend: B batch, S sequence, N heads, D head size, H = N * D hidden, P positions in the cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.kernels.rotary import rotary
from optimus.model.dense import RMSNorm
from optimus.model.linear import Linear


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


class Attention(nn.Module):
    """Multi-head attention; the weights of q, k and v are one parameter so that one product computes all three."""

    def __init__(self, hidden: int, heads: int, qk_norm_eps: float | None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(hidden, 3, hidden)
        self.out = Linear(hidden, hidden)
        self.q_norm = RMSNorm(hidden, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(hidden, qk_norm_eps) if qk_norm_eps is not None else None

    def forward(self, x_BSH: Tensor, table: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Tensor:
        """`table` is `rotary_table` at the positions of x; with a `cache`, x continues the sequence held there."""
        q, k, v = self.qkv(x_BSH).chunk(3, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        q, k = rotary(q, table), rotary(k, table)
        if cache is not None:
            k, v = cache.append(k, v)
        y_BSND = _causal_attention(q, k, v)
        return self.out(y_BSND.flatten(-2))


def _causal_attention(q_BSND: Tensor, k_BPND: Tensor, v_BPND: Tensor) -> Tensor:
    """Softmax attention of the last S of P positions over all positions up to their own."""
    q, k, v = (t.transpose(1, 2) for t in (q_BSND, k_BPND, v_BPND))
    new, seen = q.shape[2], k.shape[2]
    if new == seen:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(1, 2)
