"""Dropless Mixture-of-Experts feed-forward layer.

Legend: T tokens, H hidden, E experts, I intermediate, J = 2 I, K experts per token, R = T * K routed rows.
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
        """Sum over the K chosen experts of weight times expert output; [T, H].

        Rows are sorted by expert, run through the experts slice by slice, and put back in token order before the sum, so
        that the order of the additions, and with it every bit of the result, is the same in each run.
        """
        tokens, chosen = indices_TK.shape
        order_R = indices_TK.flatten().argsort(stable=True)
        position_R = torch.empty_like(order_R)
        position_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        rows_E = torch.bincount(indices_TK.flatten(), minlength=len(self.down)).tolist()
        y_RH = expert_mlp(x_TH[order_R // chosen], self.gate_up.flatten(1, 2), self.down, rows_E)
        y_TKH = y_RH[position_R].view(tokens, chosen, -1)
        return torch.bmm(weights_TK.unsqueeze(1), y_TKH).squeeze(1)


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
