"""The router: which experts a token goes to, with what weights, and the statistics its losses are made of.

Legend: T tokens, H hidden, E experts, K experts per token.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from optimus.kernels import backend
from optimus.kernels.backend import compute_dtype
from optimus.model.parameters import Size, declare
from optimus.model.parts import LOCAL, Parts

Routing = Literal["learned", "uniform"]


class RouterStats(NamedTuple):
    """Sums over the tokens of one or more layers, from which the losses follow; sums of layers are added.

    Because both losses are functions of these sums, they have the same value however the layers are divided.
    """

    counts_E: Tensor  # how often each expert was chosen; fp32, no gradient
    probabilities_E: Tensor  # router probabilities summed over tokens; fp32
    z: Tensor  # squared log-sum-exp of the logits summed over tokens; fp32 scalar
    tokens: int  # tokens times layers

    def __add__(self, other: "RouterStats") -> "RouterStats":  # type: ignore[override]
        return RouterStats(
            self.counts_E + other.counts_E,
            self.probabilities_E + other.probabilities_E,
            self.z + other.z,
            self.tokens + other.tokens,
        )

    def balance_loss(self, share_E: Tensor | None = None) -> Tensor:
        """E * sum_e (share of choices of e) * (mean probability of e): OLMoE section 2, as in `transformers`.

        `share_E` are choices per token, by default over these tokens. When they are those of the global batch, the mean of
        the losses of its parts is the loss of the whole (Demons in the Detail, section 3).
        """
        if share_E is None:
            share_E = self.counts_E / self.tokens
        return len(self.counts_E) * (share_E * self.probabilities_E / self.tokens).sum()

    def z_loss(self) -> Tensor:
        """Mean over tokens and layers of logsumexp(logits)^2 (ST-MoE, eq. 5)."""
        return self.z / self.tokens


class Router(nn.Module):
    """Softmax over all experts, then the K largest, with their probabilities as weights; `renormalise`: made to sum to 1.

    `routing="uniform"` forces the paper's uniform routing (section 2.3), with the router's probabilities as weights: token t
    of a sequence goes to experts t*K ... t*K + K-1 modulo E. Every expert gets as many tokens of a sequence, or one more
    where E does not divide them. As nothing counts but its position, a token's experts are the same whatever is beside it
    in a batch or on a rank.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        experts_per_token: int,
        routing: Routing,
        renormalise: bool = False,
        parts: Parts = LOCAL,
    ) -> None:
        super().__init__()
        self.weight = declare(self, "weight", Size("choices", experts), Size("hidden", hidden))
        self._product, self._use = parts.product("choices", "hidden"), parts.parameters.use
        self.renormalise = renormalise
        self.experts_per_token = experts_per_token
        self.routing = routing

    def forward(self, x_TH: Tensor, position_T: Tensor | None = None) -> tuple[Tensor, Tensor, RouterStats]:
        """(weights_TK in x's type, expert indices_TK int64, statistics). Softmax and statistics are fp32.

        `position_T`: of every token in its sequence, by default as if all were one sequence.
        """
        logits_TE = self._product(x_TH, self.weight, *self._use(self.weight))
        forced_T = self._forced(x_TH, position_T)
        if backend.use_triton(x_TH):
            from optimus.kernels.triton.router import router

            routed = router(logits_TE, self.experts_per_token, forced_T=forced_T, renormalise=self.renormalise)
            stats = RouterStats(routed.counts_E, routed.probabilities_E, routed.z, len(x_TH))
            return routed.weights_TK, routed.indices_TK, stats
        logits_TE = logits_TE.to(compute_dtype(logits_TE.dtype))
        probabilities_TE = logits_TE.softmax(-1)
        tokens, experts = logits_TE.shape
        if forced_T is None:
            weights_TK, indices_TK = probabilities_TE.topk(self.experts_per_token, dim=-1)
        else:
            choice_K = torch.arange(self.experts_per_token, device=x_TH.device)
            indices_TK = (forced_T[:, None] * self.experts_per_token + choice_K) % experts
            weights_TK = probabilities_TE.gather(1, indices_TK)
        if self.renormalise:  # of the logits: all chosen probabilities may be too small for fp32
            weights_TK = logits_TE.gather(1, indices_TK).softmax(-1)
        stats = RouterStats(
            counts_E=torch.bincount(indices_TK.flatten(), minlength=experts).float(),
            probabilities_E=probabilities_TE.sum(0),
            z=logits_TE.logsumexp(-1).square().sum(),
            tokens=tokens,
        )
        return weights_TK.to(x_TH.dtype), indices_TK, stats

    def _forced(self, x_TH: Tensor, position_T: Tensor | None) -> Tensor | None:
        """The positions of the tokens, where these decide about their experts."""
        if self.routing == "learned":
            return None
        return torch.arange(len(x_TH), device=x_TH.device) if position_T is None else position_T
