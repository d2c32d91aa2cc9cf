"""The experts' feed-forward layers: gather, two products per expert, weighted sum; one autograd function for all of it.

Rows are sorted by expert, so each expert's rows are one contiguous slice and every product is an ordinary matrix product.
Each slice is padded to a multiple of 64 rows: CPU libraries compile a kernel for every shape that they meet, and the number
of rows of an expert is different in every batch. Padding rows have weight zero and are read by nobody.

Saved for the backward pass are x, the weights, the pre-activation z and indices. The gradient of a routing weight is
<h, down^T g>, so the experts' outputs need not be kept; the input's gradient is a sum over the inverse index, so
nothing is scattered and every addition has a fixed order.

Legend: T tokens, K experts per token, P padded routed rows, E experts, H hidden, I intermediate, J = 2 I.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.kernels.swiglu import swiglu_backward, swiglu_reference

_PADDING = 64  # rows


class Routes(NamedTuple):
    """Where each choice (t, k) lies among the rows sorted by expert."""

    choice_P: Tensor  # t * K + k of every row; of padding rows any valid one
    real_P: Tensor  # 1 for rows of a choice, 0 for padding; the type of the weights
    position_TK: Tensor  # the row of every choice
    slices: list[tuple[int, slice]]  # (expert, its rows), experts without rows left out


def make_routes(indices_TK: Tensor, experts: int, dtype: torch.dtype) -> Routes:
    """Sort the choices by expert, stably, each expert's rows beginning at a multiple of the padding."""
    choices = indices_TK.flatten()
    order = choices.argsort(stable=True)
    rows_E = torch.bincount(choices, minlength=experts)
    padded_E = (rows_E + _PADDING - 1).div(_PADDING, rounding_mode="floor") * _PADDING
    shift_E = (padded_E - rows_E).cumsum(0) - (padded_E - rows_E)
    place = torch.arange(len(choices), device=choices.device) + shift_E[choices[order]]
    size = int(padded_E.sum())
    choice_P = choices.new_zeros(size)
    choice_P[place] = order
    real_P = torch.zeros(size, dtype=dtype, device=choices.device)
    real_P[place] = 1
    position = torch.empty_like(order)
    position[order] = place
    ends = padded_E.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    slices = [(e, slice(start, end)) for e, (start, end) in enumerate(zip(starts, ends)) if end > start]
    return Routes(choice_P, real_P, position.view_as(indices_TK), slices)


def expert_mlp(x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
    """Sum over k of weights[t, k] * down_e(silu(gate_e(x_t)) * up_e(x_t)) with e = indices[t, k]; [T, H].

    `gate_up_EJH` holds gate then up. Gradients flow to x, the weights and both parameters.
    """
    routes = make_routes(indices_TK, len(down_EHI), weights_TK.dtype)
    return _ExpertMLP.apply(x_TH, weights_TK, gate_up_EJH, down_EHI, routes)


def expert_mlp_reference(
    x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor
) -> Tensor:
    """The definition, for tests."""
    y_TEH = torch.stack([swiglu_reference(x_TH @ a.T) @ b.T for a, b in zip(gate_up_EJH, down_EHI)], 1)
    y_TKH = y_TEH.gather(1, indices_TK[..., None].expand(-1, -1, x_TH.shape[1]))
    return (weights_TK[..., None] * y_TKH).sum(1)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weights_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, routes: Routes
    ) -> Tensor:
        x_PH = x_TH[routes.choice_P // weights_TK.shape[1]]
        z_PJ = x_TH.new_empty(len(x_PH), gate_up_EJH.shape[1])
        y_PH = torch.empty_like(x_PH)
        for e, rows in routes.slices:
            torch.mm(x_PH[rows], gate_up_EJH[e].T, out=z_PJ[rows])
            torch.mm(swiglu_reference(z_PJ[rows]), down_EHI[e].T, out=y_PH[rows])
        ctx.save_for_backward(x_TH, weights_TK, gate_up_EJH, down_EHI, z_PJ)
        ctx.routes = routes
        return torch.bmm(weights_TK[:, None], y_PH[routes.position_TK]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        (y_grad_TH,) = grads
        x_TH, weights_TK, gate_up_EJH, down_EHI, z_PJ = ctx.saved_tensors
        routes: Routes = ctx.routes
        token_P = routes.choice_P // weights_TK.shape[1]
        x_PH, g_PH = x_TH[token_P], y_grad_TH[token_P]
        weight_P1 = (weights_TK.flatten()[routes.choice_P] * routes.real_P)[:, None]
        weight_grad_P = torch.empty_like(routes.real_P)
        gate_up_grad, down_grad = torch.zeros_like(gate_up_EJH), torch.zeros_like(down_EHI)
        x_grad_PH = torch.empty_like(x_PH)
        for e, rows in routes.slices:
            h_grad = g_PH[rows] @ down_EHI[e]
            z_grad, h = swiglu_backward(h_grad * weight_P1[rows], z_PJ[rows])
            torch.linalg.vecdot(h, h_grad, out=weight_grad_P[rows])
            torch.mm(g_PH[rows].T, h.mul_(weight_P1[rows]), out=down_grad[e])
            torch.mm(z_grad.T, x_PH[rows], out=gate_up_grad[e])
            torch.mm(z_grad, gate_up_EJH[e], out=x_grad_PH[rows])
        x_grad = x_grad_PH[routes.position_TK].sum(1)
        return x_grad, weight_grad_P[routes.position_TK], gate_up_grad, down_grad, None
