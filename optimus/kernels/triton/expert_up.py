"""Stage 4a, expert computation: the gathered up-projection with SwiGLU (Algorithm 1 of the Optimus paper, lines 75-78).

A row's input is read where its token lies, so the gathered input (line 75) never exists. Gate and up of the same columns are
two tiles of sums in one program, and the activation is its epilogue. z is stored for the backward pass, which recomputes h
from it; therefore h is made from z as rounded, here too.

Legend: T tokens, K experts per token, P routed rows, E experts, R tiles of rows, H hidden, I intermediate, J = 2 I.
"""

import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.triton.expert_reduce import expert_reduce
from optimus.kernels.triton.grouped import grouped_product, two_products, weight_gradient, within
from optimus.kernels.triton.swiglu import swiglu_tile
from optimus.kernels.triton.token_index import TokenIndex, rows_of_tile
from optimus.kernels.triton.tuning import precision, tiles


def expert_up(x_TH: Tensor, gate_up_EJH: Tensor, routes: TokenIndex) -> tuple[Tensor, Tensor]:
    """(z_PJ, h_PI): gate and up projection of every row's token, and their activation, in x's type."""
    J, H = gate_up_EJH.shape[1:]
    I, P = J // 2, len(routes.choice_P)
    z_PJ, h_PI = x_TH.new_empty(P, J), x_TH.new_empty(P, I)
    t = tiles("up", x_TH, routes.row_tile, I, H)
    _expert_up[(len(routes.expert_R) * triton.cdiv(I, t.columns),)](
        x_TH, gate_up_EJH, z_PJ, h_PI, routes.choice_P, routes.expert_R, routes.first_R, routes.offset_E1,
        routes.position_TK.shape[1], H=H, I=I,
        ROW_TILE=t.rows, COLUMNS=t.columns, INNER=t.inner, PRECISION=precision(),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return z_PJ, h_PI


def expert_up_backward(z_grad_PJ: Tensor, gate_up_EJH: Tensor, routes: TokenIndex) -> Tensor:
    """Gradient of x [T, H]: a product per row, then for each token the sum over its rows in the order of its choices."""
    x_grad_PH = grouped_product("up_backward", z_grad_PJ, gate_up_EJH, routes)
    return expert_reduce(x_grad_PH, None, routes.position_TK)


def expert_up_weight_gradient(
    z_grad_PJ: Tensor, x_TH: Tensor, routes: TokenIndex, into_EJH: Tensor, *, accumulate: bool
) -> Tensor:
    """Gradient of gate_up, written or added to `into_EJH`."""
    return weight_gradient(z_grad_PJ, x_TH, routes, gather_a=False, into_EMN=into_EJH, accumulate=accumulate)


@triton.jit(do_not_specialize=["K"])
def _expert_up(
    x_TH, gate_up_EJH, z_PJ, h_PI, choice_P, expert_R, first_R, offset_E1, K, H: tl.constexpr, I: tl.constexpr,
    ROW_TILE: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column_tiles: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert = tl.load(expert_R + tile)
    if expert < 0:
        return
    first, row, readable = rows_of_tile(tile, expert, first_R, offset_E1, ROW_TILE)
    token = tl.load(choice_P + first + readable) // K
    i = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    x_rows = x_TH + token.to(tl.int64) * H
    gate_columns = gate_up_EJH + expert.to(tl.int64) * 2 * I * H + within(i, I, COLUMNS) * H
    gate, up = two_products(x_rows, gate_columns, gate_columns + I * H, 1, H, INNER, ROW_TILE, COLUMNS, PRECISION)
    gate, up = gate.to(z_PJ.dtype.element_ty), up.to(z_PJ.dtype.element_ty)
    inside = (row == readable)[:, None] & (i < I)[None, :]
    z_at = z_PJ + first * 2 * I + (row[:, None] * 2 * I + i[None, :])
    tl.store(z_at, gate, mask=inside)
    tl.store(z_at + I, up, mask=inside)
    h = swiglu_tile(gate.to(tl.float32), up.to(tl.float32))
    h_at = h_PI + first * I + (row[:, None] * I + i[None, :])
    tl.store(h_at, h.to(h_PI.dtype.element_ty), mask=inside)
