"""Dropless Mixture-of-Experts feed-forward layer.

Legend: B batch, S sequence, T = B * S tokens, H hidden, K experts per token.
"""

import torch
from torch import Tensor, nn

from optimus.kernels.expert_mlp import expert_mlp
from optimus.model.moe.dispatch import Dispatch, local_dispatch
from optimus.model.moe.router import Router, RouterStats, Routing


class Experts(nn.Module):
    """The weights of the experts that are here: gate and up projection together, and the down projection."""

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2, intermediate, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
        """Sum over the K chosen experts of weight times expert output; [T, H]. A choice of -1 is skipped."""
        sinks = getattr(self.gate_up, "sink", None), getattr(self.down, "sink", None)
        return expert_mlp(x_TH, weights_TK, indices_TK, self.gate_up.flatten(1, 2), self.down, sinks)


class MoeLayer(nn.Module):
    """Router, then experts. `dispatch` carries the tokens to the experts: all on this device, unless it is replaced."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        experts_per_token: int,
        routing: Routing = "learned",
        renormalise: bool = False,
    ) -> None:
        super().__init__()
        self.expert_count = experts  # of the whole layer; some may be on other ranks
        self.dispatch: Dispatch = local_dispatch
        self.router = Router(hidden, experts, experts_per_token, routing, renormalise)
        self.experts = Experts(experts, hidden, intermediate)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, RouterStats]:
        x_TH = x_BSH.flatten(0, -2)
        weights_TK, indices_TK, stats = self.router(x_TH)
        return self.dispatch(x_TH, weights_TK, indices_TK, self.experts).view_as(x_BSH), stats
