"""Stage 4b, expert computation: the down-projection (Algorithm 1 of the Optimus paper, line 79), and its backward pass.

Of the output's gradient g [T, H], a row of the experts' output has weights[t, k] * g[t] (line 107). That product is not
made: down^T g is computed from g where it lies, the weight comes in the epilogue. There too h is computed again from z; the
gradient of the routing weight, <y, g> in line 108, is <down h, g> = <h, down^T g>, so that y need not be kept.

Legend: T tokens, K experts per token, P routed rows, E experts, R tiles of rows, H hidden, I intermediate, J = 2 I,
C tiles of columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.triton.grouped import grouped_product, two_products, weight_gradient, within
from optimus.kernels.triton.swiglu import swiglu_tile, swiglu_tile_backward
from optimus.kernels.triton.token_index import TokenIndex, rows_of_tile
from optimus.kernels.triton.tuning import precision, tiles


def expert_down(h_PI: Tensor, down_EHI: Tensor, routes: TokenIndex) -> Tensor:
    """The experts' outputs, row by row; [P, H]."""
    return grouped_product("down", h_PI, down_EHI.transpose(1, 2), routes)


class DownGradients(NamedTuple):
    z_PJ: Tensor  # gradient of the pre-activation
    h_PI: Tensor  # not a gradient: the activation times the row's weight, which the weight gradient needs
    weight_PC: Tensor  # gradient of the row's weight, in parts that are to be summed; fp32


def expert_down_backward(
    y_grad_TH: Tensor, weights_TK: Tensor, z_PJ: Tensor, down_EHI: Tensor, routes: TokenIndex
) -> DownGradients:
    """From the gradient of the block's output, before and after the activation at once."""
    H, I = down_EHI.shape[1:]
    t = tiles("down_backward", y_grad_TH, routes.row_tile, max(I, 32), H)  # it is halved
    column_tiles = triton.cdiv(I, t.columns)
    out = DownGradients(
        torch.empty_like(z_PJ),
        z_PJ.new_empty(len(z_PJ), I),
        z_PJ.new_empty(len(z_PJ), column_tiles, dtype=torch.float32),
    )
    _expert_down_backward[(len(routes.expert_R) * column_tiles,)](
        y_grad_TH, weights_TK, z_PJ, down_EHI, *out, routes.choice_P, routes.expert_R, routes.first_R, routes.offset_E1,
        routes.position_TK.shape[1], H=H, I=I,
        ROW_TILE=t.rows, COLUMNS=t.columns, INNER=t.inner, PRECISION=precision(),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


def expert_down_weight_gradient(
    y_grad_TH: Tensor, weighted_h_PI: Tensor, routes: TokenIndex, into_EHI: Tensor, *, accumulate: bool
) -> Tensor:
    """Gradient of down, written or added to `into_EHI`."""
    return weight_gradient(y_grad_TH, weighted_h_PI, routes, gather_a=True, into_EMN=into_EHI, accumulate=accumulate)


@triton.jit(do_not_specialize=["K"])
def _expert_down_backward(
    y_grad_TH, weights_TK, z_PJ, down_EHI, z_grad_PJ, weighted_h_PI, weight_grad_PC, choice_P, expert_R, first_R,
    offset_E1, K, H: tl.constexpr, I: tl.constexpr,
    ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column_tiles: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert = tl.load(expert_R + tile)
    if expert < 0:
        return
    first, row, readable = rows_of_tile(tile, expert, first_R, offset_E1, ROW_TILE)
    choice = tl.load(choice_P + first + readable)
    half: tl.constexpr = COLUMNS // 2
    i = column_tile * COLUMNS + tl.arange(0, half)
    g_rows = y_grad_TH + (choice // K).to(tl.int64) * H
    down = down_EHI + expert.to(tl.int64) * H * I
    h_grad, h_grad_2 = two_products(
        g_rows, down + within(i, I, COLUMNS), down + within(i + half, I, COLUMNS), I,
        H, INNER, ROW_TILE, half, PRECISION,
    )  # fmt: skip

    real = row == readable
    weight = tl.load(weights_TK + choice).to(tl.float32)
    z, z_grad, weighted_h = z_PJ + first * 2 * I, z_grad_PJ + first * 2 * I, weighted_h_PI + first * I
    sums = _through_swiglu(h_grad, weight, z, z_grad, weighted_h, row, real, i, I)
    sums += _through_swiglu(h_grad_2, weight, z, z_grad, weighted_h, row, real, i + half, I)
    tl.store(weight_grad_PC + (first + row) * column_tiles + column_tile, sums, mask=real)


@triton.jit
def _through_swiglu(h_grad, weight, z, z_grad, weighted_h, row, real, i, I: tl.constexpr):
    """Store what follows from down^T g in columns i; return the part of <h, down^T g>.

    Columns go through here half a tile at a time, as a whole tile's values do not fit the registers.
    """
    inside = real[:, None] & (i < I)[None, :]
    z_at, h_at = row[:, None] * 2 * I + i[None, :], row[:, None] * I + i[None, :]
    gate = tl.load(z + z_at, mask=inside, other=0).to(tl.float32)
    up = tl.load(z + I + z_at, mask=inside, other=0).to(tl.float32)
    h = swiglu_tile(gate, up)
    tl.store(weighted_h + h_at, (weight[:, None] * h).to(weighted_h.dtype.element_ty), mask=inside)
    gate_grad, up_grad = swiglu_tile_backward(weight[:, None] * h_grad, gate, up)
    tl.store(z_grad + z_at, gate_grad.to(z_grad.dtype.element_ty), mask=inside)
    tl.store(z_grad + I + z_at, up_grad.to(z_grad.dtype.element_ty), mask=inside)
    return tl.sum(tl.where(inside, h * h_grad, 0), axis=1)
