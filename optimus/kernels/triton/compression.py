"""Conversion of a buffer between its dense and its compressed form, by a bit mask; see `state.masks`.

Legend: P positions of the dense form, W = ceil(P / 32) words of bits, B blocks, K unpruned positions.
"""

import triton
import triton.language as tl
from torch import Tensor

_WORD = 32


def compress(x_P: Tensor, words_W: Tensor, before_B: Tensor, unpruned: int, block: int) -> Tensor:
    """Returns the elements of x whose bits in `words_W` (int32, lowest bit first) are set; [K].

    `before_B` (int32) has, for each block of `block` positions, the number of unpruned elements before the block.
    `block` must be a power of two, and `unpruned` must be K.
    """
    compressed_K = x_P.new_empty(unpruned)
    if unpruned:
        _compress[(len(before_B),)](x_P, words_W, before_B, compressed_K, len(x_P), BLOCK=block, WORD=_WORD)
    return compressed_K


def expand(compressed_K: Tensor, words_W: Tensor, before_B: Tensor, x_P: Tensor, block: int) -> None:
    """Writes `compressed_K` to the unpruned positions of x, and leaves the other elements unchanged."""
    if len(compressed_K):
        _expand[(len(before_B),)](compressed_K, words_W, before_B, x_P, len(x_P), BLOCK=block, WORD=_WORD)


@triton.jit
def _unpruned_indices(words_W, before_B, P, BLOCK: tl.constexpr, WORD: tl.constexpr):
    """Returns (positions of this program's block, mask of the unpruned positions, indices in the compressed form)."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_W + p // WORD, mask=p < P, other=0)
    unpruned = (word >> (p % WORD).to(tl.int32)) & 1
    index = tl.load(before_B + tl.program_id(0)) + tl.cumsum(unpruned, 0) - 1
    return p, (unpruned == 1) & (p < P), index


@triton.jit
def _compress(x_P, words_W, before_B, compressed_K, P, BLOCK: tl.constexpr, WORD: tl.constexpr):
    p, unpruned, index = _unpruned_indices(words_W, before_B, P, BLOCK, WORD)
    x = tl.load(x_P + p, mask=p < P)  # loads pruned elements too, which share cache lines with unpruned elements
    tl.store(compressed_K + index, x, mask=unpruned)


@triton.jit
def _expand(compressed_K, words_W, before_B, x_P, P, BLOCK: tl.constexpr, WORD: tl.constexpr):
    p, unpruned, index = _unpruned_indices(words_W, before_B, P, BLOCK, WORD)
    tl.store(x_P + p, tl.load(compressed_K + index, mask=unpruned), mask=unpruned)
