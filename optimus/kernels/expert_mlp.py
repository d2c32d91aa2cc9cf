"""The experts' feed-forward layers on rows sorted by expert.

Each expert's rows are one contiguous slice, so every product is an ordinary matrix product on slices. One autograd
function covers all experts: the backward pass computes the activation again from the pre-activation z and writes each
expert's weight gradient into its place in one buffer.

Legend: R routed rows, E experts, H hidden, I intermediate.
"""

from typing import Any

import torch
from torch import Tensor

from optimus.kernels.swiglu import swiglu_backward, swiglu_reference


def expert_mlp(x_RH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, rows_E: list[int]) -> Tensor:
    """down_e(silu(gate_e(x)) * up_e(x)) for every row x of expert e; [R, H].

    `gate_up_EJH` [E, 2 I, H] holds gate then up. `rows_E` says how many consecutive rows each expert owns; their sum is R.
    """
    return _ExpertMLP.apply(x_RH, gate_up_EJH, down_EHI, rows_E)


def expert_mlp_reference(x_RH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, rows_E: list[int]) -> Tensor:
    """The definition, for tests."""
    parts = [
        swiglu_reference(x @ gate_up.T) @ down.T
        for x, gate_up, down in zip(x_RH.split(rows_E), gate_up_EJH, down_EHI, strict=True)
    ]
    return torch.cat(parts)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, rows_E: list[int]) -> Tensor:
        z_RJ = x_RH.new_empty(len(x_RH), gate_up_EJH.shape[1])
        y_RH = torch.empty_like(x_RH)
        for e, rows in _slices(rows_E):
            torch.mm(x_RH[rows], gate_up_EJH[e].T, out=z_RJ[rows])
            torch.mm(swiglu_reference(z_RJ[rows]), down_EHI[e].T, out=y_RH[rows])
        ctx.save_for_backward(x_RH, gate_up_EJH, down_EHI, z_RJ)
        ctx.rows = rows_E
        return y_RH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (y_grad_RH,) = grads
        x_RH, gate_up_EJH, down_EHI, z_RJ = ctx.saved_tensors
        x_grad = torch.empty_like(x_RH)
        gate_up_grad, down_grad = torch.zeros_like(gate_up_EJH), torch.zeros_like(down_EHI)
        for e, rows in _slices(ctx.rows):
            z_grad, h = swiglu_backward(y_grad_RH[rows] @ down_EHI[e], z_RJ[rows])
            torch.mm(y_grad_RH[rows].T, h, out=down_grad[e])
            torch.mm(z_grad.T, x_RH[rows], out=gate_up_grad[e])
            torch.mm(z_grad, gate_up_EJH[e], out=x_grad[rows])
        return x_grad, gate_up_grad, down_grad, None


def _slices(rows_E: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) for every expert that has any."""
    found, start = [], 0
    for e, rows in enumerate(rows_E):
        if rows:
            found.append((e, slice(start, start + rows)))
        start += rows
    return found
