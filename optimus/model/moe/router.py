"""The router, which chooses each token's experts.

Legend: T tokens, H hidden, E experts (after G: experts of a group), K experts per token, G groups of experts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from optimus.kernels import backend
from optimus.kernels.backend import compute_dtype
from optimus.model.linear import ProjectionModule
from optimus.model.moe.choices import SOFTMAX, RouterConfig, choices_of
from optimus.model.moe.statistics import RouterStats
from optimus.model.parameters import Size, declare
from optimus.step_context import StepContext


class Router(ProjectionModule):
    """Scores the experts, and chooses K experts and their weights for each token.

    `router_config` has these settings:

    - `score`: scores are a softmax or a sigmoid of the logits.
    - `groups`: number of groups of experts. The router ranks the groups by the sum of each group's two largest scores.
      A token chooses experts only in the first `groups_per_token` groups.
    - `renormalise`: the router divides the weights of a token by their sum.
    - `scale`: factor of the weights.
    - `bias`: the router adds a bias per expert to the scores, for the choice only (DeepSeek-V3, section 2.1.2).
    - `logit_bias`: the projection has a bias, which is a parameter.

    `force_balanced` forces the uniform routing of the Optimus paper (section 2.3), with weights from the scores: token
    t of a sequence or document goes to experts t*K ... t*K + K-1 modulo E.
    """

    replaceable = (*ProjectionModule.replaceable, "step")
    bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        experts_per_token: int,
        force_balanced: bool = False,
        router_config: RouterConfig = SOFTMAX,
    ) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(experts) if router_config.bias else None)
        choices = Size("choices", experts)
        self.weight = declare(self, "weight", choices, Size("hidden", hidden), role="router")
        biased = router_config.logit_bias
        self.logit_bias = declare(self, "logit_bias", choices, role="vector", initial=0.0) if biased else None
        self.step = StepContext()
        usual = RouterConfig(renormalise=router_config.renormalise, logit_bias=router_config.logit_bias)
        self.router_config, self._plain = router_config, router_config == usual
        self.experts_per_token = experts_per_token
        self.force_balanced = force_balanced
        self._chosen_E: Tensor | None = None  # the result of the next `take_choices`

    def forward(self, x_TH: Tensor, position_T: Tensor | None = None) -> tuple[Tensor, Tensor, RouterStats]:
        """Returns (weights_TK in x's dtype, expert indices_TK int64, statistics).

        `position_T` is the position of each token in its sequence or document; by default all tokens are one sequence.
        """
        logits_TE = self.product(x_TH, self.weight, self.gradients.get(self.weight))
        if self.logit_bias is not None:
            logits_TE = logits_TE + self.logit_bias
        forced_T = self._forced(x_TH, position_T)
        renormalise = self.router_config.renormalise
        if self._plain and backend.use_triton(x_TH):
            from optimus.kernels.triton.router import router

            routed = router(logits_TE, self.experts_per_token, forced_T=forced_T, renormalise=renormalise)
            self.step.chose(self, routed.counts_E)
            stats = RouterStats(routed.counts_E, routed.probabilities_E, routed.z, len(x_TH))
            return routed.weights_TK, routed.indices_TK, stats
        logits_TE = logits_TE.to(compute_dtype(logits_TE.dtype))
        softmax = self.router_config.score == "softmax"
        scores_TE = logits_TE.softmax(-1) if softmax else logits_TE.sigmoid()
        tokens, experts = logits_TE.shape
        if forced_T is not None:
            choice_K = torch.arange(self.experts_per_token, device=x_TH.device)
            indices_TK = (forced_T[:, None] * self.experts_per_token + choice_K) % experts
            weights_TK = scores_TE.gather(1, indices_TK)
        elif self._plain:
            weights_TK, indices_TK = scores_TE.topk(self.experts_per_token, dim=-1)
        else:
            indices_TK = self._best(scores_TE)
            weights_TK = scores_TE.gather(1, indices_TK)
        if renormalise and softmax:  # softmax of the chosen logits: the chosen scores may all underflow in fp32
            weights_TK = logits_TE.gather(1, indices_TK).softmax(-1)
        elif renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if self.router_config.scale != 1:
            weights_TK = weights_TK * self.router_config.scale
        counts_E = choices_of(indices_TK, experts)
        self.step.chose(self, counts_E)
        if self.bias is not None and torch.is_grad_enabled():
            self._chosen_E = counts_E if self._chosen_E is None else self._chosen_E + counts_E
        stats = RouterStats(
            counts_E=counts_E.float(),
            probabilities_E=(scores_TE if softmax else scores_TE / scores_TE.sum(-1, keepdim=True)).sum(0),
            z=logits_TE.logsumexp(-1).square().sum(),
            tokens=tokens,
        )
        return weights_TK.to(x_TH.dtype), indices_TK, stats

    def _best(self, scores_TE: Tensor) -> Tensor:
        """Returns the indices [T, K] of the experts chosen by score, bias and group."""
        groups, chosen = self.router_config.groups, self.router_config.groups_per_token
        if self.bias is not None:
            scores_TE = scores_TE.detach() + self.bias
        if chosen < groups:
            scores_TGE = scores_TE.unflatten(1, (groups, -1))
            best_TG = scores_TGE.topk(2, dim=-1)[0].sum(-1).topk(chosen, dim=-1)[1]
            masked_TG = torch.ones_like(scores_TGE[..., 0], dtype=torch.bool).scatter_(1, best_TG, False)
            scores_TE = scores_TGE.masked_fill(masked_TG[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(self.experts_per_token, dim=-1)[1]

    def take_choices(self) -> Tensor:
        """Returns how often each expert was chosen with gradients enabled since the last call: [E], int64.

        The router must have `bias`.
        """
        assert self.bias is not None
        chosen_E, self._chosen_E = self._chosen_E, None
        return torch.zeros_like(self.bias, dtype=torch.int64) if chosen_E is None else chosen_E

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Leaves the bias in fp32 for any dtype of the weights, because `move_biases` adds small steps to the bias."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None:
            self.bias = self.bias.float() if bias.is_meta else bias.to(self.bias.device)
        return self

    def _forced(self, x_TH: Tensor, position_T: Tensor | None) -> Tensor | None:
        """Returns the positions [T] of the tokens if `force_balanced`, else None."""
        if not self.force_balanced:
            return None
        return torch.arange(len(x_TH), device=x_TH.device) if position_T is None else position_T


@torch.no_grad()
def move_biases(routers: Sequence[Router], rate: float, add_up: Callable[[Tensor], None]) -> None:
    """Moves each expert's bias by `rate`: up if the expert was chosen less often than the mean, down if more often.

    The method is auxiliary-loss-free balancing (DeepSeek-V3, section 2.1.2). `add_up` sums the counts in place over the
    ranks.
    """
    chosen = [router.take_choices() for router in routers]
    if not rate or not chosen:
        return
    counts = torch.cat(chosen)
    add_up(counts)
    for router, counts_E in zip(routers, counts.split([len(each) for each in chosen]), strict=True):
        assert router.bias is not None
        router.bias.add_((counts_E.sum() - counts_E * len(counts_E)).sign(), alpha=rate)
