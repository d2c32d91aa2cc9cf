"""The experts' feed-forward layers in one autograd function: gather, two matmuls per expert, weighted sum.

The method is Algorithm 1 of the Optimus paper (FastSparseMoE), stages 2 to 5:

- 2, token counting (lines 15-43), and 3, index generation (lines 45-72): `make_routes`
- 4, expert computation (lines 75-79): the loop over experts
- 5, output reduction (lines 81-96): `_sum_of_rows`

The gradient of a routing weight is <h, down^T g>, for the activation h and the output's gradient g.

Legend: T tokens, K experts per token, P routed rows with padding and any spare row, E experts, H hidden, I
intermediate, J = 2 I.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels import backend
from optimus.kernels.activation import Activation, activation_reference, gated_activation, gated_activation_backward
from optimus.kernels.gradient_buffer import GradientBuffer, WeightGradient
from optimus.kernels.matmul import matmul
from optimus.step_context import Forms

# Padding rounds the number of an expert's rows up to a multiple of this number: CPU libraries may compile a kernel for
# each shape.
PADDING = 16
_FEW_PADDING = 2  # replaces `PADDING` in inference mode if experts have few rows


class Routes(NamedTuple):
    """The positions of all choices (t, k) among the rows sorted by expert.

    If any choice is -1, the last row is a spare row for all choices of -1.
    """

    choice_P: Tensor  # t * K + k of every row; padding rows repeat a choice of the same expert, the spare row has 0
    real_P: Tensor  # 1 for the row of a choice, 0 for padding and the spare row
    position_TK: Tensor  # the row of every choice; the spare row for a choice of -1
    skipped_TK: Tensor | None  # True where the choice is -1; None if no choice is -1
    slices: list[tuple[int, slice]]  # (expert, rows of the expert), without idle experts

    @property
    def most(self) -> int:
        """The maximum number of rows of an expert."""
        return max((rows.stop - rows.start for _, rows in self.slices), default=0)

    @property
    def fullest(self) -> list[tuple[int, slice]]:
        """The longest slice and the longest pair of consecutive slices, filled up to four slices (all if fewer)."""
        sizes = [rows.stop - rows.start for _, rows in self.slices]
        pairs = [sum(sizes[max(0, i - 1) : i + 1]) for i in range(len(sizes))]
        ends = [values.index(max(values)) for values in (sizes, pairs) if values]
        wanted = dict.fromkeys([*ends, *(max(0, end - 1) for end in ends), *range(len(sizes))])
        return [self.slices[i] for i in sorted(list(wanted)[:4])]


def make_routes(indices_TK: Tensor, experts: int, dtype: torch.dtype, local_choices: int | None = None) -> Routes:
    """Sorts the choices by expert, stably, and pads each expert's rows.

    `local_choices` is the number of choices that are not -1, if known.
    """
    choices = indices_TK.flatten()
    skipped = int((choices < 0).sum()) if local_choices is None else len(choices) - local_choices
    order = choices.argsort(stable=True)[skipped:]
    expert = choices[order]
    rows_E = torch.bincount(expert, minlength=experts)
    few = torch.is_inference_mode_enabled() and len(order) < PADDING * experts
    padding = _FEW_PADDING if few else PADDING
    padded_E = (rows_E + padding - 1).div(padding, rounding_mode="floor") * padding
    first_E = rows_E.cumsum(0) - rows_E
    shift_E = (padded_E - rows_E).cumsum(0) - (padded_E - rows_E)
    row = torch.arange(len(order), device=choices.device) + shift_E[expert]
    choice_P = order[first_E.repeat_interleave(padded_E)]
    choice_P[row] = order
    spare = len(choice_P)
    if skipped:
        choice_P = torch.cat([choice_P, choice_P.new_zeros(1)])
    real_P = torch.zeros(len(choice_P), dtype=dtype, device=choices.device)
    real_P[row] = 1
    position = order.new_full((len(choices),), spare)
    position[order] = row
    ends = padded_E.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    slices = [(e, slice(start, end)) for e, (start, end) in enumerate(zip(starts, ends)) if end > start]
    return Routes(choice_P, real_P, position.view_as(indices_TK), indices_TK < 0 if skipped else None, slices)


def expert_mlp(
    x_TH: Tensor,
    weights_TK: Tensor,
    indices_TK: Tensor,
    gate_up_EJH: Tensor,
    down_EHI: Tensor,
    buffers: tuple[GradientBuffer | None, GradientBuffer | None] = (None, None),
    forms: Forms | None = None,
    kind: Activation = "silu",
    bias_EJ: Tensor | None = None,
    choices: int | None = None,
) -> Tensor:
    """Returns the sum over k of weights[t, k] * down_e(h) with e = indices[t, k]; [T, H].

    h is the gated activation `kind` of gate_e(x_t) and up_e(x_t). A choice with e = -1 adds nothing. `gate_up_EJH` has
    gate, then up. `buffers` are the gradient buffers of `gate_up_EJH` and `down_EHI`. `bias_EJ` is the bias of gate and
    up. `choices` is the number of choices other than -1, if known.
    """
    if backend.use_triton(x_TH):
        from optimus.kernels.triton import expert_mlp as kernels

        routing = x_TH, weights_TK, indices_TK
        return kernels.ExpertMLP.apply(*routing, gate_up_EJH, down_EHI, buffers, choices, bias_EJ, kind)
    routes = make_routes(indices_TK, len(down_EHI), weights_TK.dtype, choices)
    return _ExpertMLP.apply(x_TH, weights_TK, gate_up_EJH, down_EHI, bias_EJ, routes, buffers, forms, kind)


def expert_mlp_reference(
    x_TH: Tensor,
    weights_TK: Tensor,
    indices_TK: Tensor,
    gate_up_EJH: Tensor,
    down_EHI: Tensor,
    bias_EJ: Tensor | None = None,
    kind: Activation = "silu",
) -> Tensor:
    """Reference implementation for tests."""
    z_ETJ = x_TH @ gate_up_EJH.mT + (0 if bias_EJ is None else bias_EJ[:, None])
    y_TEH = (activation_reference(z_ETJ, kind, gated=True) @ down_EHI.mT).transpose(0, 1)
    y_TKH = y_TEH.gather(1, indices_TK.clamp(min=0)[..., None].expand(-1, -1, x_TH.shape[1]))
    return (weights_TK.masked_fill(indices_TK < 0, 0)[..., None] * y_TKH).sum(1)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weights_TK: Tensor,
        gate_up_EJH: Tensor,
        down_EHI: Tensor,
        bias_EJ: Tensor | None,
        routes: Routes,
        buffers: tuple[GradientBuffer | None, GradientBuffer | None],
        forms: Forms | None,
        kind: Activation,
    ) -> Tensor:
        token_P = routes.choice_P // weights_TK.shape[1]
        z_PJ = x_TH.new_empty(len(token_P), gate_up_EJH.shape[1])
        y_PH = x_TH.new_empty(len(token_P), x_TH.shape[1])
        x_scratch = x_TH.new_empty(routes.most, x_TH.shape[1])
        h_scratch = x_TH.new_empty(routes.most, down_EHI.shape[2])
        for e, rows in routes.fullest if x_TH.is_meta else routes.slices:  # a few slices suffice to measure peak memory
            x, h = (scratch[: rows.stop - rows.start] for scratch in (x_scratch, h_scratch))
            torch.index_select(x_TH, 0, token_P[rows], out=x)
            matmul(x, gate_up_EJH[e].T, out=z_PJ[rows], rows_vary=True, forms=forms)
            if bias_EJ is not None:
                z_PJ[rows] += bias_EJ[e]
            gated_activation(z_PJ[rows], kind, out=h)
            matmul(h, down_EHI[e].T, out=y_PH[rows], rows_vary=True, forms=forms)
        # Saves the tensors of `routes` too: activation recomputation frees only saved tensors.
        ctx.save_for_backward(x_TH, weights_TK, gate_up_EJH, down_EHI, z_PJ, *routes[:-1])
        ctx.slices, ctx.buffers, ctx.forms = routes.slices, buffers, forms
        ctx.kind = kind
        if routes.skipped_TK is not None:
            weights_TK = weights_TK.masked_fill(routes.skipped_TK, 0)
            y_PH[-1] = 0
        return _sum_of_rows(y_PH, routes.position_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (y_grad_TH,), forms = grads, ctx.forms
        x_TH, weights_TK, gate_up_EJH, down_EHI, z_PJ, *index = ctx.saved_tensors
        routes = Routes._make([*index, ctx.slices])
        slices = routes.fullest if x_TH.is_meta else routes.slices
        token_P = routes.choice_P // weights_TK.shape[1]
        weight_P1 = (weights_TK.flatten()[routes.choice_P] * routes.real_P)[:, None]
        weight_grad_P = torch.empty_like(routes.real_P)
        x_grad_PH = x_TH.new_empty(len(token_P), x_TH.shape[1])
        busy = [e for e, _ in slices]
        gate_up = WeightGradient(gate_up_EJH, ctx.buffers[0], busy, ctx.needs_input_grad[2], forms)
        down = WeightGradient(down_EHI, ctx.buffers[1], busy, ctx.needs_input_grad[3], forms)
        for weight in (gate_up, down) if len(slices) < len(routes.slices) else ():
            weight.add_shapes(sum(rows.stop - rows.start for e, rows in routes.slices if e not in busy))
        bias_grad_EJ = z_PJ.new_zeros(gate_up_EJH.shape[:2]) if ctx.needs_input_grad[4] else None
        x_scratch, g_scratch = x_TH.new_empty(2, routes.most, x_TH.shape[1])
        h_scratch = x_TH.new_empty(routes.most, down_EHI.shape[2])
        for e, rows in slices:
            x, g, h_grad = (scratch[: rows.stop - rows.start] for scratch in (x_scratch, g_scratch, h_scratch))
            torch.index_select(x_TH, 0, token_P[rows], out=x)
            torch.index_select(y_grad_TH, 0, token_P[rows], out=g)
            matmul(g, down_EHI[e], out=h_grad, rows_vary=True, forms=forms)
            z_grad, h = gated_activation_backward(h_grad * weight_P1[rows], z_PJ[rows], ctx.kind)
            torch.linalg.vecdot(h, h_grad, out=weight_grad_P[rows])
            down.add(e, g.T, h.mul_(weight_P1[rows]))
            gate_up.add(e, z_grad.T, x)
            if bias_grad_EJ is not None:
                torch.sum(z_grad, 0, out=bias_grad_EJ[e])
            matmul(z_grad, gate_up_EJH[e], out=x_grad_PH[rows], rows_vary=True, forms=forms)
        if routes.skipped_TK is not None:
            x_grad_PH[-1] = 0
            weight_grad_P[-1] = 0
        x_grad = _sum_of_rows(x_grad_PH, routes.position_TK, None)
        weight_grad = weight_grad_P[routes.position_TK]
        return x_grad, weight_grad, gate_up.close(), down.close(), bias_grad_EJ, None, None, None, None


def _sum_of_rows(rows_PH: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Returns for each token the sum of its rows in the order of its choices, weighted by `weights_TK` if given."""
    if not len(rows_PH):
        return rows_PH.new_zeros(len(position_TK), rows_PH.shape[1])
    return F.embedding_bag(position_TK, rows_PH, mode="sum", per_sample_weights=weights_TK)
