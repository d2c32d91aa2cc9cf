"""Stage 4a, expert computation: the up-projection of gathered tokens with the gated activation (Algorithm 1 of the
Optimus paper, lines 75-78), and the projection's backward pass.

Legend: T tokens, K experts per token, P routed rows, E experts (E1: E + 1), R tiles of rows, H hidden, I intermediate,
J = 2 I.
"""

import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.activation import Activation
from optimus.kernels.triton.activation import GATED
from optimus.kernels.triton.expert_reduce import expert_reduce
from optimus.kernels.triton.grouped import described, grouped_product, halves, inner_tile, weight_gradient, within
from optimus.kernels.triton.token_index import TokenIndex, rows_of_tile
from optimus.kernels.triton.tuning import by_descriptors, precision, programs, tiles

_BIAS_ROWS, _BIAS_COLUMNS = 32, 128  # rows per step, and maximum number of columns, of a program of `_sum_rows`


def expert_up(
    x_TH: Tensor,
    gate_up_EJH: Tensor,
    token_P: Tensor,
    routes: TokenIndex,
    bias_EJ: Tensor | None = None,
    *,
    kind: Activation = "silu",
) -> tuple[Tensor, Tensor]:
    """Returns (z_PJ, h_PI) in x's dtype: gate and up projections of every row's token, and the gated activation
    `kind`.

    The unused rows of `routes` have undefined results.
    """
    J, H = gate_up_EJH.shape[1:]
    I, P = J // 2, len(token_P)
    z_PJ, h_PI = x_TH.new_empty(P, J), x_TH.new_empty(P, I)
    activation = GATED[kind]
    t = tiles("up", x_TH, routes.row_tile, I, H)
    tma = by_descriptors(gate_up_EJH)
    gate_up = described(gate_up_EJH.unflatten(1, (2, I)), [1, 2, t.columns, t.inner], tma)
    _expert_up[(programs(x_TH, len(routes.expert_R) * triton.cdiv(I, t.columns)),)](
        x_TH, gate_up, z_PJ if bias_EJ is None else bias_EJ, z_PJ, h_PI, token_P, routes.expert_R, routes.first_R,
        routes.offset_E1, routes.tiles_1, H=H, I=I, BIASED=bias_EJ is not None, ACTIVATE=activation.forward,
        AT_ONCE=activation.columns, TMA=tma, ROW_TILE=t.rows, COLUMNS=t.columns, INNER=t.inner, PRECISION=precision(),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return z_PJ, h_PI


def expert_up_backward(z_grad_PJ: Tensor, gate_up_EJH: Tensor, routes: TokenIndex) -> Tensor:
    """Returns the gradient of x [T, H]."""
    x_grad_PH = grouped_product("up_backward", z_grad_PJ, gate_up_EJH, routes, transposed=False)
    return expert_reduce(x_grad_PH, None, routes.position_TK)


def expert_up_weight_gradient(
    z_grad_PJ: Tensor, x_TH: Tensor, token_P: Tensor, routes: TokenIndex, into_EJH: Tensor, *, accumulate: bool
) -> Tensor:
    """Writes the gradient of gate_up to `into_EJH`, or adds the gradient if `accumulate`."""
    return weight_gradient(x_TH, z_grad_PJ, token_P, routes, rows_first=True, into=into_EJH, accumulate=accumulate)


def expert_up_bias_gradient(z_grad_PJ: Tensor, experts: int, routes: TokenIndex) -> Tensor:
    """Returns the gradient of the bias [E, J]."""
    J = z_grad_PJ.shape[1]
    grad_EJ, columns = z_grad_PJ.new_empty(experts, J), min(_BIAS_COLUMNS, triton.next_power_of_2(J))
    grid = (experts, triton.cdiv(J, columns))
    _sum_rows[grid](z_grad_PJ, routes.offset_E1, grad_EJ, J=J, ROWS=_BIAS_ROWS, COLUMNS=columns)
    return grad_EJ


@triton.jit
def _sum_rows(rows_PJ, offset_E1, out_EJ, J: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    expert = tl.program_id(0)
    start, end = tl.load(offset_E1 + expert), tl.load(offset_E1 + expert + 1)
    row, j = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(start, end, ROWS):
        at = rows_PJ + (first + row).to(tl.int64)[:, None] * J + j[None, :]
        rows = tl.load(at, mask=(row < end - first)[:, None] & (j < J)[None, :], other=0)
        sums += tl.sum(rows.to(tl.float32), axis=0)
    tl.store(out_EJ + expert.to(tl.int64) * J + j, sums.to(out_EJ.dtype.element_ty), mask=j < J)


@triton.jit
def _expert_up(
    x_TH, gate_up, bias_EJ, z_PJ, h_PI, token_P, expert_R, first_R, offset_E1, tiles_1, H: tl.constexpr,
    I: tl.constexpr, BIASED: tl.constexpr, ACTIVATE: tl.constexpr, AT_ONCE: tl.constexpr, TMA: tl.constexpr,
    ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column_tiles: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    inner = tl.arange(0, INNER)
    for work in tl.range(tl.program_id(0), tl.load(tiles_1) * column_tiles, tl.num_programs(0), flatten=TMA):
        tile, column = work // column_tiles, work % column_tiles * COLUMNS
        expert = tl.load(expert_R + tile)
        first, row, readable = rows_of_tile(tile, expert, first_R, offset_E1, ROW_TILE)
        token = tl.load(token_P + first + readable)
        x_at = x_TH + token.to(tl.int64)[:, None] * H + inner[None, :]
        if BIASED or not TMA:
            both = tl.arange(0, 2 * COLUMNS)  # columns of gate, then the same columns of up
            j = within(column + both % COLUMNS, I, COLUMNS) + both // COLUMNS * I
        if not TMA:
            w_at = gate_up + expert.to(tl.int64) * 2 * I * H + (j * H)[None, :] + inner[:, None]
        sums = tl.zeros((ROW_TILE, 2 * COLUMNS), dtype=tl.float32)
        for l in range(0, H, INNER):
            if TMA:
                w_tile = gate_up.load([expert, 0, column, l]).reshape(2 * COLUMNS, INNER).T
            else:
                w_tile = inner_tile(w_at, l, H, INNER, 0)
                w_at += INNER
            sums = tl.dot(inner_tile(x_at, l, H, INNER, 1), w_tile, sums, input_precision=PRECISION)
            x_at += INNER
        if BIASED:
            sums += tl.load(bias_EJ + expert.to(tl.int64) * 2 * I + j).to(tl.float32)[None, :]
        # h comes from the rounded z, as in the backward pass.
        gate, up = halves(sums.to(z_PJ.dtype.element_ty), ROW_TILE, COLUMNS)
        z, h, real = z_PJ + first.to(tl.int64) * 2 * I, h_PI + first.to(tl.int64) * I, row == readable
        _activated(gate, up, z, h, row, real, column, I, ACTIVATE, AT_ONCE, ROW_TILE, COLUMNS)


@triton.jit
def _activated(
    gate, up, z, h, row, real, column, I: tl.constexpr, ACTIVATE: tl.constexpr, AT_ONCE: tl.constexpr,
    ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if COLUMNS > AT_ONCE:
        gate_left, gate_right = halves(gate, ROW_TILE, COLUMNS // 2)
        up_left, up_right = halves(up, ROW_TILE, COLUMNS // 2)
        _activated(gate_left, up_left, z, h, row, real, column, I, ACTIVATE, AT_ONCE, ROW_TILE, COLUMNS // 2)
        column += COLUMNS // 2
        _activated(gate_right, up_right, z, h, row, real, column, I, ACTIVATE, AT_ONCE, ROW_TILE, COLUMNS // 2)
    else:
        i = column + tl.arange(0, COLUMNS)
        inside = real[:, None] & (i < I)[None, :]
        z_at = row[:, None] * 2 * I + i[None, :]
        tl.store(z + z_at, gate, mask=inside)
        tl.store(z + I + z_at, up, mask=inside)
        activated = ACTIVATE(gate.to(tl.float32), up.to(tl.float32))
        tl.store(h + (row[:, None] * I + i[None, :]), activated.to(h.dtype.element_ty), mask=inside)
