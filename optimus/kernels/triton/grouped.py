"""Products of the experts' rows with the experts' weights, in tiles: what stages 4a, 4b and their backward passes share.

Legend: P routed rows, E experts, R tiles of rows; A [P, L] @ B [E, L, N] -> [P, N]; a weight's gradient is [E, M, N].
"""

import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.triton.token_index import TokenIndex, rows_of_tile
from optimus.kernels.triton.tuning import Kernel, precision, tiles


def grouped_product(kernel: Kernel, a_PL: Tensor, b_ELN: Tensor, routes: TokenIndex) -> Tensor:
    """[P, N] in a's type: each row times the matrix of its expert. `b_ELN` may be transposed (strided) in its last dims."""
    (P, L), N = a_PL.shape, b_ELN.shape[2]
    out_PN = a_PL.new_empty(P, N)
    t = tiles(kernel, a_PL, routes.row_tile, N, L)
    _grouped_product[(len(routes.expert_R) * triton.cdiv(N, t.columns),)](
        a_PL, b_ELN, out_PN, routes.expert_R, routes.first_R, routes.offset_E1, *b_ELN.stride(), L=L, N=N,
        ROW_TILE=t.rows, COLUMNS=t.columns, INNER=t.inner, PRECISION=precision(),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out_PN


def weight_gradient(
    a: Tensor, b: Tensor, routes: TokenIndex, *, gather_a: bool, into_EMN: Tensor, accumulate: bool
) -> Tensor:
    """Per expert, the sum over its rows of a's row times b's row; [E, M, N], written or added to `into_EMN`, which returns.

    One operand, a if `gather_a`, is of tokens [T, M] and gathered by the rows' tokens; the other is of routed rows [P, M].
    One program owns a tile of one expert's gradient and goes over the expert's rows in order, so nothing is added by two.
    """
    E, M, N = into_EMN.shape
    t = tiles("weight_gradient", a, M, N, routes.row_tile)
    programs = E * triton.cdiv(M, t.rows) * triton.cdiv(N, t.columns)
    _weight_gradient[(max(1, programs),)](
        a, b, into_EMN, routes.choice_P, routes.offset_E1, routes.position_TK.shape[1], M=M, N=N,
        GATHER_A=gather_a, ACCUMULATE=accumulate,
        TILE_M=t.rows, TILE_N=t.columns, ROWS=t.inner, PRECISION=precision(), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return into_EMN


@triton.jit
def within(columns, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns that can be read: itself where tiles divide N, so that the compiler still sees that they are contiguous."""
    if N % COLUMNS == 0:
        return columns
    else:
        return tl.minimum(columns, N - 1)


@triton.jit
def tile_product(
    a_rows, b_columns, b_stride, L: tl.constexpr, INNER: tl.constexpr,
    ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [ROW_TILE, COLUMNS]; pointers to the beginning of the rows of A and of the columns of B, and B's step along L."""
    inner = tl.arange(0, INNER)
    a = a_rows[:, None] + inner[None, :]
    b = b_columns[None, :] + (inner * b_stride)[:, None]
    sums = tl.zeros((ROW_TILE, COLUMNS), dtype=tl.float32)
    for l in range(0, L, INNER):
        if L % INNER == 0:
            a_tile, b_tile = tl.load(a), tl.load(b)
        else:
            real = inner < L - l
            a_tile, b_tile = tl.load(a, mask=real[None, :], other=0), tl.load(b, mask=real[:, None], other=0)
        sums = tl.dot(a_tile, b_tile, sums, input_precision=PRECISION)
        a += INNER
        b += INNER * b_stride
    return sums


@triton.jit
def two_products(
    a_rows, b_columns, c_columns, stride, L: tl.constexpr, INNER: tl.constexpr,
    ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(A @ B, A @ C), as `tile_product`, but A is read once; B and C have the same step along L."""
    inner = tl.arange(0, INNER)
    a = a_rows[:, None] + inner[None, :]
    b = b_columns[None, :] + (inner * stride)[:, None]
    c = c_columns[None, :] + (inner * stride)[:, None]
    b_sums = tl.zeros((ROW_TILE, COLUMNS), dtype=tl.float32)
    c_sums = tl.zeros((ROW_TILE, COLUMNS), dtype=tl.float32)
    for l in range(0, L, INNER):
        if L % INNER == 0:
            a_tile, b_tile, c_tile = tl.load(a), tl.load(b), tl.load(c)
        else:
            real = inner < L - l
            a_tile = tl.load(a, mask=real[None, :], other=0)
            b_tile = tl.load(b, mask=real[:, None], other=0)
            c_tile = tl.load(c, mask=real[:, None], other=0)
        b_sums = tl.dot(a_tile, b_tile, b_sums, input_precision=PRECISION)
        c_sums = tl.dot(a_tile, c_tile, c_sums, input_precision=PRECISION)
        a += INNER
        b += INNER * stride
        c += INNER * stride
    return b_sums, c_sums


@triton.jit
def _grouped_product(
    a_PL, b_ELN, out_PN, expert_R, first_R, offset_E1, stride_e, stride_l, stride_n, L: tl.constexpr, N: tl.constexpr,
    ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert = tl.load(expert_R + tile)
    if expert < 0:
        return
    first, row, readable = rows_of_tile(tile, expert, first_R, offset_E1, ROW_TILE)
    n = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    a_rows = a_PL + first * L + readable * L
    b_columns = b_ELN + expert.to(tl.int64) * stride_e + within(n, N, COLUMNS) * stride_n
    out = tile_product(a_rows, b_columns, stride_l, L, INNER, ROW_TILE, COLUMNS, PRECISION)
    at = out_PN + first * N + (row[:, None] * N + n[None, :])
    tl.store(at, out.to(out_PN.dtype.element_ty), mask=(row == readable)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["K"])
def _weight_gradient(
    a, b, into_EMN, choice_P, offset_E1, K, M: tl.constexpr, N: tl.constexpr,
    GATHER_A: tl.constexpr, ACCUMULATE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n: tl.constexpr = (N + TILE_N - 1) // TILE_N
    tiles_mn: tl.constexpr = (M + TILE_M - 1) // TILE_M * tiles_n
    expert, tile = tl.program_id(0) // tiles_mn, tl.program_id(0) % tiles_mn
    start, end = tl.load(offset_E1 + expert), tl.load(offset_E1 + expert + 1)
    if ACCUMULATE:  # noqa: SIM102 (known when compiled; the other is not)
        if start == end:
            return
    m = tile // tiles_n * TILE_M + tl.arange(0, TILE_M)
    n = tile % tiles_n * TILE_N + tl.arange(0, TILE_N)
    at = into_EMN + expert.to(tl.int64) * M * N + (m[:, None] * N + n[None, :])
    inside = (m < M)[:, None] & (n < N)[None, :]
    sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    if ACCUMULATE:  # before the products: after them there are no registers for a second tile
        sums += tl.load(at, mask=inside, other=0).to(tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        real = rows < end
        token = tl.load(choice_P + rows, mask=real, other=0) // K
        if GATHER_A:
            a_row, b_row = token, rows
        else:
            a_row, b_row = rows, token
        a_at = a_row.to(tl.int64)[:, None] * M + m[None, :]
        b_at = b_row.to(tl.int64)[:, None] * N + n[None, :]
        # Zero rows on both sides: what lies past the expert's rows may be anything.
        a_tile = tl.load(a + a_at, mask=real[:, None] & (m < M)[None, :], other=0)
        b_tile = tl.load(b + b_at, mask=real[:, None] & (n < N)[None, :], other=0)
        sums = tl.dot(tl.trans(a_tile), b_tile, sums, input_precision=PRECISION)
    tl.store(at, sums.to(into_EMN.dtype.element_ty), mask=inside)
