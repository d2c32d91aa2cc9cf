"""The experts' feed-forward layers as one autograd function: stages 2 to 5 of Algorithm 1 (Optimus paper).

Legend: T tokens, K experts per token, P routed rows, E experts of this rank, H hidden, I intermediate, J = 2 I, C
partial sums per gradient of a routing weight.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels.activation import Activation
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.triton.expert_down import expert_down, expert_down_backward, expert_down_weight_gradient
from optimus.kernels.triton.expert_reduce import expert_reduce, expert_reduce_backward
from optimus.kernels.triton.expert_up import (
    expert_up,
    expert_up_backward,
    expert_up_bias_gradient,
    expert_up_weight_gradient,
)
from optimus.kernels.triton.token_index import TokenIndex, token_index
from optimus.kernels.triton.tuning import row_tile


class ExpertMLP(torch.autograd.Function):
    """See `kernels.expert_mlp`. The kernels skip choices outside [0, E)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        gate_up_EJH: Tensor,
        down_EHI: Tensor,
        buffers: tuple[GradientBuffer | None, GradientBuffer | None],
        choices: int | None = None,
        bias_EJ: Tensor | None = None,
        kind: Activation = "silu",
    ) -> Tensor:
        x_TH, weights_TK = x_TH.contiguous(), weights_TK.contiguous()
        gate_up_EJH, down_EHI = gate_up_EJH.contiguous(), down_EHI.contiguous()
        experts = len(down_EHI)
        mean = indices_TK.numel() if choices is None else choices
        routes = token_index(indices_TK, experts, row_tile(x_TH, mean, experts), choices)
        bias_EJ = None if bias_EJ is None else bias_EJ.contiguous()
        z_PJ, h_PI = expert_up(x_TH, gate_up_EJH, routes.token_P(), routes, bias_EJ, kind=kind)
        y_PH = expert_down(h_PI, down_EHI, routes)
        ctx.save_for_backward(x_TH, weights_TK, gate_up_EJH, down_EHI, z_PJ, *routes[:-1])
        ctx.row_tile, ctx.buffers, ctx.kind = routes.row_tile, buffers, kind
        return expert_reduce(y_PH, weights_TK, routes.position_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, gate_up_EJH, down_EHI, z_PJ, *index = ctx.saved_tensors
        routes = TokenIndex._make([*index, ctx.row_tile])
        up_buffer, down_buffer = ctx.buffers
        y_grad_TH = grads[0].contiguous()
        token_P = routes.token_P()
        z_grad_PJ, weighted_h_PI, weight_grad_PC = expert_down_backward(
            y_grad_TH, weights_TK, z_PJ, down_EHI, token_P, routes, kind=ctx.kind
        )
        # Precedes the weight gradients: after `GradientBuffer.add`, the weight's memory may be free.
        x_grad_TH = expert_up_backward(z_grad_PJ, gate_up_EJH, routes)
        of_down = partial(expert_down_weight_gradient, y_grad_TH, weighted_h_PI, token_P, routes)
        down_grad = _gradient(down_EHI, down_buffer, of_down) if ctx.needs_input_grad[4] else None
        of_gate_up = partial(expert_up_weight_gradient, z_grad_PJ, x_TH, token_P, routes)
        gate_up_grad = _gradient(gate_up_EJH, up_buffer, of_gate_up) if ctx.needs_input_grad[3] else None
        bias_grad = expert_up_bias_gradient(z_grad_PJ, len(down_EHI), routes) if ctx.needs_input_grad[7] else None
        weights_grad_TK = expert_reduce_backward(weight_grad_PC, weights_TK, routes.position_TK)
        return x_grad_TH, weights_grad_TK, None, gate_up_grad, down_grad, None, None, bias_grad, None


def _gradient(weight: Tensor, buffer: GradientBuffer | None, write: Callable[..., Tensor]) -> Tensor | None:
    if buffer is None:
        return write(torch.empty_like(weight), accumulate=False)
    buffer.add(lambda grad: write(grad.view(weight.shape), accumulate=True))
    return None
