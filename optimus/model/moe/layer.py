"""Dropless Mixture-of-Experts feed-forward layer.

Legend: B batch, S sequence, T = B * S tokens, H hidden, K experts per token.
"""

import torch
from torch import Tensor, nn

from optimus.kernels.expert_mlp import expert_mlp
from optimus.model.moe.router import Router, RouterStats, Routing


class Experts(nn.Module):
    """The weights of all experts: gate and up projection together, and the down projection."""

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2, intermediate, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
        """Sum over the K chosen experts of weight times expert output; [T, H]."""
        return expert_mlp(x_TH, weights_TK, indices_TK, self.gate_up.flatten(1, 2), self.down)


class MoeLayer(nn.Module):
    """Router, then experts."""

    def __init__(self, hidden: int, intermediate: int, experts: int, experts_per_token: int, routing: Routing) -> None:
        super().__init__()
        self.router = Router(hidden, experts, experts_per_token, routing)
        self.experts = Experts(experts, hidden, intermediate)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, RouterStats]:
        x_TH = x_BSH.flatten(0, -2)
        weights_TK, indices_TK, stats = self.router(x_TH)
        return self.experts(x_TH, weights_TK, indices_TK).view_as(x_BSH), stats
