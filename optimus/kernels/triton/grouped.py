"""Tiled matmuls of experts, for stages 4a, 4b and their backward passes (Algorithm 1 of the Optimus paper).

Legend: T tokens, P routed rows, E experts, E1 = E + 1, R tiles of rows; L inputs, N outputs, [X, Y] = [L, N] or [N, L];
G columns of tokens, O columns of routed rows. Weight gradients have [M, N] = [G, O] or [O, G].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from optimus.kernels.triton.token_index import TokenIndex, rows_of_tile
from optimus.kernels.triton.tuning import Kernel, adds_in_memory, by_descriptors, precision, programs, tiles


def grouped_product(kernel: Kernel, a_PL: Tensor, b_EXY: Tensor, routes: TokenIndex, *, transposed: bool) -> Tensor:
    """Returns [P, N]: each routed row times the [L, N] matrix of the row's expert.

    With `transposed`, the matrices are stored as [N, L]. Rows from `routes.offset_E1[-1]` on are not written.
    """
    P, L = a_PL.shape
    N = b_EXY.shape[1 if transposed else 2]
    out_PN = a_PL.new_empty(P, N)
    t = tiles(kernel, a_PL, routes.row_tile, N, L)
    tma = by_descriptors(a_PL, b_EXY)
    b_block = [1, t.columns, t.inner] if transposed else [1, t.inner, t.columns]
    _grouped_product[(programs(a_PL, len(routes.expert_R) * triton.cdiv(N, t.columns)),)](
        described(a_PL, [t.rows, t.inner], tma), described(b_EXY, b_block, tma), out_PN,
        routes.expert_R, routes.first_R, routes.offset_E1, routes.tiles_1, L=L, N=N, TRANSPOSED=transposed, TMA=tma,
        ROW_TILE=t.rows, COLUMNS=t.columns, INNER=t.inner, PRECISION=precision(),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out_PN


def described(x: Tensor, block_shape: list[int], tma: bool) -> Any:
    """Returns a descriptor of `x` with tiles of `block_shape` if `tma`, else `x` itself. `x` must be contiguous."""
    return TensorDescriptor.from_tensor(x, block_shape) if tma else x


def weight_gradient(
    tokens_TG: Tensor, rows_PO: Tensor, token_P: Tensor, routes: TokenIndex, *, rows_first: bool, into: Tensor,
    accumulate: bool,
) -> Tensor:  # fmt: skip
    """Sums, over the rows p of each expert, the outer products of `tokens_TG[token_P[p]]` and `rows_PO[p]`.

    The result is [E, G, O], or [E, O, G] if `rows_first`. Adds the result to `into` if `accumulate`, else overwrites
    `into`. Returns `into`.
    """
    E, M, N = into.shape
    t = tiles("weight_gradient", rows_PO, M, N, routes.row_tile)
    work = E * triton.cdiv(M, t.rows) * triton.cdiv(N, t.columns)
    # The kernel creates its descriptors in memory from this allocator.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=into.device))
    _weight_gradient[(programs(rows_PO, work),)](
        tokens_TG, rows_PO, into, token_P, routes.offset_E1, E, M=M, N=N, ROWS_FIRST=rows_first,
        ACCUMULATE=accumulate, IN_MEMORY=adds_in_memory(into), TMA=by_descriptors(rows_PO),
        TILE_M=t.rows, TILE_N=t.columns, ROWS=t.inner, PRECISION=precision(), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return into


@triton.jit
def within(columns, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Clamps column indices to at most N - 1."""
    if N % COLUMNS == 0:
        return columns
    else:
        return tl.minimum(columns, N - 1)


@triton.jit
def halves(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Returns the two halves of the columns of x [ROWS, 2 HALF]."""
    return x.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()


@triton.jit
def inner_tile(pointers, l, L: tl.constexpr, INNER: tl.constexpr, AXIS: tl.constexpr):
    """Loads `pointers` [.., INNER, ..]; 0 where `l` plus the index in dim AXIS is at least L."""
    if L % INNER == 0:
        return tl.load(pointers)
    else:
        real = tl.expand_dims(tl.arange(0, INNER) < L - l, 1 - AXIS)
        return tl.load(pointers, mask=real, other=0)


@triton.jit
def _grouped_product(
    a, b, out_PN, expert_R, first_R, offset_E1, tiles_1, L: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr, ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    inner = tl.arange(0, INNER)
    for work in tl.range(tl.program_id(0), tl.load(tiles_1) * column_tiles, tl.num_programs(0), flatten=TMA):
        tile, column = work // column_tiles, work % column_tiles * COLUMNS
        expert = tl.load(expert_R + tile)
        first, row, readable = rows_of_tile(tile, expert, first_R, offset_E1, ROW_TILE)
        n = column + tl.arange(0, COLUMNS)
        sums = tl.zeros((ROW_TILE, COLUMNS), dtype=tl.float32)
        if not TMA:
            a_at = a + first.to(tl.int64) * L + (readable * L)[:, None] + inner[None, :]
            b_at = b + expert.to(tl.int64) * L * N
            columns = within(n, N, COLUMNS)[None, :]
            b_at += columns * L + inner[:, None] if TRANSPOSED else columns + (inner * N)[:, None]
        for l in range(0, L, INNER):
            if TMA:
                a_tile = a.load([first, l])
                if TRANSPOSED:
                    b_tile = b.load([expert, column, l]).reshape(COLUMNS, INNER).T
                else:
                    b_tile = b.load([expert, l, column]).reshape(INNER, COLUMNS)
            else:
                a_tile = inner_tile(a_at, l, L, INNER, 1)
                b_tile = inner_tile(b_at, l, L, INNER, 0)
                a_at += INNER
                b_at += INNER if TRANSPOSED else INNER * N
            sums = tl.dot(a_tile, b_tile, sums, input_precision=PRECISION)
        at = out_PN + first.to(tl.int64) * N + (row[:, None] * N + n[None, :])
        tl.store(at, sums.to(out_PN.dtype.element_ty), mask=(row == readable)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["E"])
def _weight_gradient(
    tokens_TG, rows_PO, into_EMN, token_P, offset_E1, E, M: tl.constexpr, N: tl.constexpr, ROWS_FIRST: tl.constexpr,
    ACCUMULATE: tl.constexpr, IN_MEMORY: tl.constexpr, TMA: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n: tl.constexpr = (N + TILE_N - 1) // TILE_N
    tiles_mn: tl.constexpr = (M + TILE_M - 1) // TILE_M * tiles_n
    O: tl.constexpr = M if ROWS_FIRST else N
    G: tl.constexpr = N if ROWS_FIRST else M
    TILE_O: tl.constexpr = TILE_M if ROWS_FIRST else TILE_N
    for work in tl.range(tl.program_id(0), E * tiles_mn, tl.num_programs(0), flatten=TMA):
        expert, tile = work // tiles_mn, work % tiles_mn
        start, end = tl.load(offset_E1 + expert), tl.load(offset_E1 + expert + 1)
        first_m, first_n = tile // tiles_n * TILE_M, tile % tiles_n * TILE_N
        m, n = first_m + tl.arange(0, TILE_M), first_n + tl.arange(0, TILE_N)
        into = into_EMN + tl.full((), M * N, tl.int64) * expert
        sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        if ROWS_FIRST:
            o, g, first_o = m, n, first_m
        else:
            o, g, first_o = n, m, first_n
        if TMA:  # the descriptor ends at the expert's last row and loads zeros beyond this row
            own = tl.make_tensor_descriptor(
                rows_PO + start.to(tl.int64) * O, [tl.maximum(end - start, 1), O], [O, 1], [ROWS, TILE_O]
            )
        row = tl.arange(0, ROWS)
        token = tl.load(token_P + start + row, mask=row < end - start, other=0)
        for first in range(start, end, ROWS):
            real = row < end - first
            gathered_at = tokens_TG + token.to(tl.int64)[:, None] * G + g[None, :]
            gathered = tl.load(gathered_at, mask=real[:, None] & (g < G)[None, :], other=0)
            token = tl.load(token_P + first + ROWS + row, mask=row < end - first - ROWS, other=0)
            if TMA:
                of_rows = own.load([first - start, first_o])
            else:
                of_rows_at = rows_PO + (first + row).to(tl.int64)[:, None] * O + o[None, :]
                of_rows = tl.load(of_rows_at, mask=real[:, None] & (o < O)[None, :], other=0)
            if ROWS_FIRST:
                sums = tl.dot(of_rows.T, gathered, sums, input_precision=PRECISION)
            else:
                sums = tl.dot(gathered.T, of_rows, sums, input_precision=PRECISION)
        # Stores half a tile at a time: a second whole tile may not fit into the registers.
        left, right = halves(sums, TILE_M, TILE_N // 2)
        _put(left, into, m, first_n, end > start, M, N, ACCUMULATE, IN_MEMORY, TILE_N // 2)
        _put(right, into, m, first_n + TILE_N // 2, end > start, M, N, ACCUMULATE, IN_MEMORY, TILE_N // 2)


@triton.jit
def _put(
    sums, into_MN, m, first_n, any_rows, M: tl.constexpr, N: tl.constexpr, ACCUMULATE: tl.constexpr,
    IN_MEMORY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes columns of a tile. With `ACCUMULATE`, adds the columns instead, by atomics if `IN_MEMORY`."""
    n = first_n + tl.arange(0, COLUMNS)
    at, inside = into_MN + (m[:, None] * N + n[None, :]), (m < M)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        inside = inside & any_rows
    if ACCUMULATE and IN_MEMORY:
        tl.atomic_add(at, sums, mask=inside, sem="relaxed")
    else:
        if ACCUMULATE:
            sums += tl.load(at, mask=inside, other=0).to(tl.float32)
        tl.store(at, sums.to(into_MN.dtype.element_ty), mask=inside)
