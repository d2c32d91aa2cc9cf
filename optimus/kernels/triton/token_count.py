"""Stage 2, token counting (Algorithm 1 of the Optimus paper, lines 15-43): counts the rows of each expert.

Legend: T tokens, K experts per token, E experts of this rank (E1: E + 1), B blocks of tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.triton.tuning import pow2

_BITMAP = 8192  # maximum of (tokens of a block) x (experts); a block of 16 tokens, the least, may exceed it


class TokenCounts(NamedTuple):
    """The positions at which the rows of each expert and of each block begin, if rows are sorted by expert, and the
    number of tokens per block."""

    base_EB: Tensor  # for each expert and block: the first row of the block's tokens
    offset_E1: Tensor  # the first row of each expert, and the end of the last expert's rows
    tokens: int  # number of tokens per block


def token_count(indices_TK: Tensor, experts: int) -> TokenCounts:
    """Counts how often the tokens of each block chose each of `experts` local experts, and returns the running sums.

    Indices outside [0, experts) do not count.
    """
    indices_TK = indices_TK.contiguous()
    tokens = max(16, min(128, _BITMAP // pow2(experts)))
    blocks = max(1, triton.cdiv(len(indices_TK), tokens))
    partial_EB = indices_TK.new_empty(experts, blocks, dtype=torch.int32)
    _count[(blocks,)](indices_TK, partial_EB, *indices_TK.shape, experts, blocks, TOKENS=tokens, EXPERTS=pow2(experts))
    sums = partial_EB.new_zeros(experts * blocks + 1)
    torch.cumsum(partial_EB.flatten(), 0, dtype=torch.int32, out=sums[1:])
    return TokenCounts(sums[:-1].view(experts, blocks), sums[::blocks].contiguous(), tokens)


@triton.jit
def choices_of_block(indices_TK, t, k, T, K):
    """Returns the k-th choices of tokens t; -1 past the last token."""
    return tl.load(indices_TK + t.to(tl.int64) * K + k, mask=t < T, other=-1)


@triton.jit
def hits_of_block(indices_TK, t, T, K, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """Returns how often each of the tokens t chose each expert, int32 [TOKENS, EXPERTS]."""
    e = tl.arange(0, EXPERTS)
    hits = tl.zeros((TOKENS, EXPERTS), dtype=tl.int32)
    for k in range(K):
        hits += (choices_of_block(indices_TK, t, k, T, K)[:, None] == e[None, :]).to(tl.int32)
    return hits


@triton.jit(do_not_specialize=["T", "K", "E", "blocks"])
def _count(indices_TK, partial_EB, T, K, E, blocks, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    block = tl.program_id(0)
    t = block * TOKENS + tl.arange(0, TOKENS)
    hits = hits_of_block(indices_TK, t, T, K, TOKENS, EXPERTS)
    e = tl.arange(0, EXPERTS)
    tl.store(partial_EB + e * blocks + block, tl.sum(hits, axis=0), mask=e < E)
