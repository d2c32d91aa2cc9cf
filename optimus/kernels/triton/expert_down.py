"""Stage 4b, expert computation: the down-projection (Algorithm 1 of the Optimus paper, line 79), and its backward pass.

The backward kernel computes down^T g for the output's gradient g, and applies the routing weight afterwards (line 107).
The gradient of the routing weight, <y, g> in line 108, is <h, down^T g>.

Legend: T tokens, K experts per token, P routed rows, E experts, E1 = E + 1, R tiles of rows, H hidden, I intermediate,
J = 2 I, C tiles of columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.activation import Activation
from optimus.kernels.triton.activation import GATED
from optimus.kernels.triton.grouped import described, grouped_product, halves, inner_tile, weight_gradient, within
from optimus.kernels.triton.token_index import TokenIndex, rows_of_tile
from optimus.kernels.triton.tuning import by_descriptors, precision, programs, tiles


def expert_down(h_PI: Tensor, down_EHI: Tensor, routes: TokenIndex) -> Tensor:
    """Returns the experts' outputs [P, H], before the routing weights. Rows from `routes.offset_E1[-1]` on are not
    written."""
    return grouped_product("down", h_PI, down_EHI, routes, transposed=True)


class DownGradients(NamedTuple):
    z_PJ: Tensor
    h_PI: Tensor  # the activation times the row's routing weight
    weight_PC: Tensor  # the gradient of the row's routing weight, as one partial sum per tile of columns; fp32


def expert_down_backward(
    y_grad_TH: Tensor,
    weights_TK: Tensor,
    z_PJ: Tensor,
    down_EHI: Tensor,
    token_P: Tensor,
    routes: TokenIndex,
    *,
    kind: Activation = "silu",
) -> DownGradients:
    """Computes `DownGradients` from the gradient of the layer's output [T, H] with the gated activation `kind`."""
    H, I = down_EHI.shape[1:]
    activation = GATED[kind]
    t = tiles("down_backward", y_grad_TH, routes.row_tile, max(I, activation.columns_backward), H)
    column_tiles = triton.cdiv(I, t.columns)
    out = DownGradients(
        torch.empty_like(z_PJ),
        z_PJ.new_empty(len(z_PJ), I),
        z_PJ.new_empty(len(z_PJ), column_tiles, dtype=torch.float32),
    )
    tma = by_descriptors(down_EHI)
    _expert_down_backward[(programs(y_grad_TH, len(routes.expert_R) * column_tiles),)](
        y_grad_TH, weights_TK, z_PJ, described(down_EHI, [1, t.inner, t.columns], tma), *out, routes.choice_P, token_P,
        routes.expert_R, routes.first_R, routes.offset_E1, routes.tiles_1, H=H, I=I, ACTIVATE=activation.forward,
        DIFFERENTIATE=activation.backward, AT_ONCE=activation.columns_backward, TMA=tma, ROW_TILE=t.rows,
        COLUMNS=t.columns, INNER=t.inner, PRECISION=precision(), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


def expert_down_weight_gradient(
    y_grad_TH: Tensor, weighted_h_PI: Tensor, token_P: Tensor, routes: TokenIndex, into_EHI: Tensor, *, accumulate: bool
) -> Tensor:
    """Writes the gradient of down to `into_EHI`, or adds the gradient if `accumulate`."""
    return weight_gradient(
        y_grad_TH, weighted_h_PI, token_P, routes, rows_first=False, into=into_EHI, accumulate=accumulate
    )


@triton.jit
def _expert_down_backward(
    y_grad_TH, weights_TK, z_PJ, down, z_grad_PJ, weighted_h_PI, weight_grad_PC, choice_P, token_P, expert_R, first_R,
    offset_E1, tiles_1, H: tl.constexpr, I: tl.constexpr, ACTIVATE: tl.constexpr, DIFFERENTIATE: tl.constexpr,
    AT_ONCE: tl.constexpr, TMA: tl.constexpr, ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    column_tiles: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    inner = tl.arange(0, INNER)
    for work in tl.range(tl.program_id(0), tl.load(tiles_1) * column_tiles, tl.num_programs(0), flatten=TMA):
        tile, column_tile = work // column_tiles, work % column_tiles
        column = column_tile * COLUMNS
        expert = tl.load(expert_R + tile)
        first, row, readable = rows_of_tile(tile, expert, first_R, offset_E1, ROW_TILE)
        token = tl.load(token_P + first + readable)
        g_at = y_grad_TH + token.to(tl.int64)[:, None] * H + inner[None, :]
        if not TMA:
            columns = within(column + tl.arange(0, COLUMNS), I, COLUMNS)
            w_at = down + expert.to(tl.int64) * H * I + columns[None, :] + (inner * I)[:, None]
        h_grad = tl.zeros((ROW_TILE, COLUMNS), dtype=tl.float32)
        for l in range(0, H, INNER):
            if TMA:
                w_tile = down.load([expert, l, column]).reshape(INNER, COLUMNS)
            else:
                w_tile = inner_tile(w_at, l, H, INNER, 0)
                w_at += INNER * I
            h_grad = tl.dot(inner_tile(g_at, l, H, INNER, 1), w_tile, h_grad, input_precision=PRECISION)
            g_at += INNER
        real = row == readable
        weight = tl.load(weights_TK + tl.load(choice_P + first + readable)).to(tl.float32)
        begin = first.to(tl.int64)
        z, z_grad, weighted_h = z_PJ + begin * 2 * I, z_grad_PJ + begin * 2 * I, weighted_h_PI + begin * I
        parts = _through_activation(
            h_grad,
            weight,
            z,
            z_grad,
            weighted_h,
            row,
            real,
            column,
            I,
            ACTIVATE,
            DIFFERENTIATE,
            AT_ONCE,
            ROW_TILE,
            COLUMNS,
        )
        tl.store(weight_grad_PC + (begin + row) * column_tiles + column_tile, parts, mask=real)


@triton.jit
def _through_activation(
    h_grad, weight, z, z_grad, weighted_h, row, real, column, I: tl.constexpr, ACTIVATE: tl.constexpr,
    DIFFERENTIATE: tl.constexpr, AT_ONCE: tl.constexpr, ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores the results for `COLUMNS` columns from `column` on; returns the partial sums of <h, down^T g>.

    Each step takes a few columns: the values of a whole tile do not fit into registers.
    """
    if AT_ONCE < COLUMNS:
        left, right = halves(h_grad, ROW_TILE, COLUMNS // 2)
        parts = _through_activation(
            left, weight, z, z_grad, weighted_h, row, real, column, I, ACTIVATE, DIFFERENTIATE, AT_ONCE, ROW_TILE,
            COLUMNS // 2,
        )  # fmt: skip
        column += COLUMNS // 2
        return parts + _through_activation(
            right, weight, z, z_grad, weighted_h, row, real, column, I, ACTIVATE, DIFFERENTIATE, AT_ONCE, ROW_TILE,
            COLUMNS // 2,
        )  # fmt: skip
    else:
        i = column + tl.arange(0, COLUMNS)
        inside = real[:, None] & (i < I)[None, :]
        h_at = row[:, None] * I + i[None, :]
        z_at = h_at + row[:, None] * I
        gate = tl.load(z + z_at, mask=inside, other=0).to(tl.float32)
        up = tl.load(z + I + z_at, mask=inside, other=0).to(tl.float32)
        h = ACTIVATE(gate, up)
        tl.store(weighted_h + h_at, (weight[:, None] * h).to(weighted_h.dtype.element_ty), mask=inside)
        gate_grad, up_grad = DIFFERENTIATE(weight[:, None] * h_grad, gate, up)
        tl.store(z_grad + z_at, gate_grad.to(z_grad.dtype.element_ty), mask=inside)
        tl.store(z_grad + I + z_at, up_grad.to(z_grad.dtype.element_ty), mask=inside)
        return tl.sum(tl.where(inside, h * h_grad, 0), axis=1)
