"""Stage 3, index generation (Algorithm 1 of the Optimus paper, lines 45-72): maps rows to choices and back.

A choice (t, k) is the k-th expert of token t. Rows are the choices of this rank's experts, sorted stably by expert.

Legend: T tokens, K experts per token, E experts of this rank (E1: E + 1), P rows (the last ones may be unused),
R tiles of rows, B blocks of tokens.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.triton.token_count import choices_of_block, hits_of_block, token_count
from optimus.kernels.triton.tuning import pow2

_STEP = 128  # tiles that a program stores per step


class TokenIndex(NamedTuple):
    """Maps rows to choices and back; int32.

    Rows from `offset_E1[-1]` on are unused. `position_TK` replaces the paper's `output_indices`,
    `selected_expert_indices` and `cum_expert_counts`.
    """

    choice_P: Tensor  # the choice of every row, as t * K + k
    position_TK: Tensor  # the row of every choice; -1 for an expert of another rank
    offset_E1: Tensor  # the first row of each expert, and the end of the last expert's rows
    expert_R: Tensor
    first_R: Tensor
    tiles_1: Tensor  # number of tiles; `expert_R` and `first_R` may be longer
    row_tile: int  # number of rows per tile; an expert's last tile may have fewer

    def token_P(self) -> Tensor:
        """Returns the token of every row, int32 [P]."""
        return self.choice_P.div(self.position_TK.shape[1], rounding_mode="floor")


def token_index(indices_TK: Tensor, experts: int, row_tile: int, rows: int | None = None) -> TokenIndex:
    """Sorts the choices of `experts` local experts; see `token_count`.

    There must be fewer than 2^31 choices. `rows` is the number of local choices, if known; with a smaller number, the
    kernel writes out of bounds.
    """
    indices_TK = indices_TK.contiguous()
    T, K = indices_TK.shape
    rows = T * K if rows is None else rows
    base_EB, offset_E1, tokens = token_count(indices_TK, experts)
    blocks = base_EB.shape[1]
    choice_P = base_EB.new_empty(rows)
    position_TK = base_EB.new_empty(T, K)
    _index[(blocks,)](
        indices_TK, base_EB, choice_P, position_TK, T, K, experts, blocks, TOKENS=tokens, EXPERTS=pow2(experts)
    )
    # An expert has at most one partial tile, and no tile is empty.
    tiles = max(1, min(rows, (rows + experts * (row_tile - 1)) // row_tile))
    # These are separate tensors, not views of one: Triton compiles a kernel for each alignment.
    expert_R, first_R, tiles_1 = (base_EB.new_empty(size) for size in (tiles, tiles, 1))
    _row_tiles[(experts + 1,)](
        offset_E1, expert_R, first_R, tiles_1, experts, EXPERTS=pow2(experts), ROW_TILE=row_tile, STEP=_STEP
    )
    return TokenIndex(choice_P, position_TK, offset_E1, expert_R, first_R, tiles_1, row_tile)


@triton.jit(do_not_specialize=["T", "K", "E", "blocks"])
def _index(indices_TK, base_EB, choice_P, position_TK, T, K, E, blocks, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    block = tl.program_id(0)
    t = block * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    hits = hits_of_block(indices_TK, t, T, K, TOKENS, EXPERTS)
    base = tl.load(base_EB + e * blocks + block, mask=e < E, other=0)
    row = base[None, :] + tl.cumsum(hits, axis=0) - hits  # row of token t's next choice of expert e
    for k in range(K):
        expert = choices_of_block(indices_TK, t, k, T, K)
        hit = expert[:, None] == e[None, :]
        here = (expert >= 0) & (expert < E)
        position = tl.sum(tl.where(hit, row, 0), axis=1)
        row += hit.to(tl.int32)
        tl.store(position_TK + t * K + k, tl.where(here, position, -1), mask=t < T)
        tl.store(choice_P + position, t * K + k, mask=here)


@triton.jit(do_not_specialize=["E"])
def _row_tiles(
    offset_E1, expert_R, first_R, tiles_1, E, EXPERTS: tl.constexpr, ROW_TILE: tl.constexpr, STEP: tl.constexpr
):
    """Lists the tiles of one expert per program; the last program stores the number of all tiles."""
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    start = tl.load(offset_E1 + e, mask=e < E, other=0)
    end = tl.load(offset_E1 + e + 1, mask=e < E, other=0)
    tiles_E = (end - start + ROW_TILE - 1) // ROW_TILE
    begin = tl.sum(tl.where(e < expert, tiles_E, 0), axis=0)
    if expert == E:
        tl.store(tiles_1, begin)
    else:
        count = tl.sum(tl.where(e == expert, tiles_E, 0), axis=0)
        first_row = tl.load(offset_E1 + expert)
        for done in range(0, count, STEP):
            i = done + tl.arange(0, STEP)
            tl.store(expert_R + begin + i, expert, mask=i < count)
            tl.store(first_R + begin + i, first_row + i * ROW_TILE, mask=i < count)


@triton.jit
def rows_of_tile(tile, expert, first_R, offset_E1, ROW_TILE: tl.constexpr):
    """Returns (first row, relative rows, relative rows clamped to the expert's rows for loads).
    Relative rows keep element offsets within 32 bits."""
    first = tl.load(first_R + tile)
    row = tl.arange(0, ROW_TILE)
    last = tl.load(offset_E1 + expert + 1) - 1 - first
    return first, row, tl.minimum(row, last)
