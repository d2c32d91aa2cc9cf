"""Stage 2, token counting (Algorithm 1 of the Optimus paper, lines 15-43): counts the rows of each expert.

A program compares each choice of a block of tokens with every expert. The column sums of the hits are the program's
partial counts. One prefix sum over (expert, block) then gives the first row of each block's choices of each expert.

Legend: T tokens, K experts per token, E experts of this rank, B blocks of tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.triton.tuning import pow2

_BITMAP = 8192  # maximum of (tokens of a block) x (experts), unless 16 tokens have more


class TokenCounts(NamedTuple):
    """The first rows of experts and blocks when rows are sorted by expert; int32."""

    base_EB: Tensor  # the first row of each block's choices of each expert
    offset_E1: Tensor  # the first row of each expert, and the end of the last expert's rows
    tokens: int  # number of tokens per block


def token_count(indices_TK: Tensor, experts: int) -> TokenCounts:
    """Counts the choices of `experts` local experts.

    `indices_TK` (int32 or int64) numbers experts from 0; choices outside [0, experts) belong to other ranks and do not
    count.
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
    """Returns how often tokens t chose each expert, int32 [TOKENS, EXPERTS]."""
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
