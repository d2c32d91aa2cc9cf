"""Dropless Mixture-of-Experts feed-forward layer.

Legend: T tokens, H hidden, K experts per token, U tokens that this rank processes, E experts (in `Experts`, of
this rank), I intermediate, J = 2 I.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from optimus.kernels.activation import Activation
from optimus.kernels.expert_mlp import expert_mlp
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.model.architecture import ModelConfig
from optimus.model.dense import DenseMlp
from optimus.model.moe.choices import RouterConfig
from optimus.model.moe.dispatch import NOTHING, OverlappedWork, TokenDispatcher, local_dispatch
from optimus.model.moe.router import Router
from optimus.model.moe.statistics import RouterStats
from optimus.model.moe.tokens import TokenSplit
from optimus.model.parameters import Size, declare
from optimus.step_context import StepContext


class Experts(nn.Module):
    """The feed-forward networks of this rank's experts, without the biases of the down projections."""

    replaceable = "gradients", "step"

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        kind: Activation = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.kind, self.step = kind, StepContext()
        self.gradients: Mapping[nn.Parameter, GradientBuffer] = {}
        columns, ffn = Size("hidden", hidden), Size("expert_ffn", intermediate)
        stacked = Size("experts", experts), Size("stack", 2), ffn
        self.gate_up = declare(self, "gate_up", *stacked, columns, role="expert")
        self.bias = declare(self, "bias", *stacked, role="vector", initial=0.0) if bias else None
        self.down = declare(self, "down", Size("experts", experts), columns, ffn, role="expert")

    def forward(self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, choices: int | None = None) -> Tensor:
        """Returns the sum over the K chosen experts of weight times expert output; [T, H]. Skips choices of -1.

        `choices` is the number of choices that are not -1, if the host knows the number.
        """
        bias_EJ = None if self.bias is None else self.bias.flatten(1)
        buffers = self.gradients.get(self.gate_up), self.gradients.get(self.down)
        weights = self.gate_up.flatten(1, 2), self.down
        forms, kind = self.step.forms, self.kind
        return expert_mlp(x_TH, weights_TK, indices_TK, *weights, buffers, forms, kind, bias_EJ, choices)


class MoeLayer(nn.Module):
    """A router with its experts, and an optional shared expert.

    If the experts have biases, each rank has the biases `down_bias` of all experts. The rank adds the weighted biases
    of the chosen experts after the combine.
    """

    replaceable = "tokens", "dispatch"

    def __init__(self, config: ModelConfig, layer: int = 0, force_balanced: bool = False) -> None:
        super().__init__()
        hidden, experts, kind = config.hidden, config.experts_of(layer), config.activation
        self.expert_count = experts  # experts of the layer on all ranks
        self.router = Router(
            hidden, experts, config.experts_per_token or 0, force_balanced, RouterConfig.from_config(config)
        )
        self.experts = Experts(experts, hidden, config.expert_intermediate, kind=kind, bias=config.expert_bias)
        shared, biased = config.shared_intermediate, config.expert_bias
        self.shared = DenseMlp(hidden, shared, kind=kind) if shared else None
        sizes = Size("all_experts", experts), Size("hidden", hidden)
        self.down_bias = declare(self, "down_bias", *sizes, role="vector", initial=0.0) if biased else None
        self.tokens: TokenSplit = TokenSplit()
        self.dispatch: TokenDispatcher = local_dispatch
        # The argument of `RouterStats.among`; None if all sparse layers have the same number of experts.
        self._model = config if len(config.expert_counts) > 1 else None

    def forward(self, x_TH: Tensor, position_T: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """Returns (output in the shape of x, statistics over the whole microbatch).

        `position_T` is the position of each token in its sequence or document; by default all tokens are one sequence.
        """
        x_UH = self.tokens.take(x_TH.flatten(0, -2))
        position_U = None if position_T is None else self.tokens.local_values(position_T)
        weights_UK, indices_UK, stats = self.router(x_UH, position_U)
        shared = None if self.shared is None else _SharedExpert(self.shared, x_TH)
        y_UH = self.dispatch(x_UH, weights_UK, indices_UK, self.experts, shared or NOTHING)
        if self.down_bias is not None:
            weights_UE = weights_UK.new_zeros(len(x_UH), len(self.down_bias))
            y_UH = torch.addmm(y_UH, weights_UE.scatter(1, indices_UK, weights_UK), self.down_bias)
        y_TH = self.tokens.restore_rows(y_UH).view_as(x_TH)
        stats = self.tokens.sum(stats)
        stats = stats if self._model is None else stats.among(self._model)
        return y_TH if shared is None else y_TH + shared.y_TH, stats


class _SharedExpert(OverlappedWork):
    def __init__(self, mlp: DenseMlp, x_TH: Tensor) -> None:
        self._mlp, self._x_TH = mlp, x_TH

    def during_dispatch(self) -> None:
        self._h_TI = self._mlp.activated(self._x_TH)

    def during_combine(self) -> None:
        self.y_TH: Tensor = self._mlp.down(self._h_TI)
