"""The router: which experts a token goes to, with what weights, and the statistics its losses are made of.

Legend: T tokens, H hidden, E experts, K experts per token.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from optimus.kernels import backend
from optimus.kernels.backend import compute_dtype
from optimus.model.linear import ProjectionModule
from optimus.model.moe.choices import SOFTMAX, Choosing, choices_of
from optimus.model.moe.statistics import RouterStats
from optimus.model.parameters import Size, declare
from optimus.step_context import StepContext


class Router(ProjectionModule):
    """Scores of all experts, then the K largest, which are their weights too; `choosing` says what else there is.

    Scores are a softmax or a sigmoid of the logits. Of `groups`, a token's experts are in those `groups_per_token` whose two
    largest scores have the largest sums. Weights are made to sum to 1 (`renormalise`) and multiplied by `scale`. A `bias` of
    each expert is added to the scores for the choice alone (DeepSeek-V3, section 2.1.2); `move_biases` changes it. A
    `logit_bias` is a parameter, of the projection.

    `force_balanced` forces the paper's uniform routing (section 2.3), with the router's scores as weights: token t of a
    sequence goes to experts t*K ... t*K + K-1 modulo E. Every expert gets as many tokens of a sequence, or one more where E
    does not divide them. As nothing counts but its position, a token's experts are the same whatever is beside it in a batch
    or on a rank.
    """

    replaceable = (*ProjectionModule.replaceable, "step")
    bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        experts_per_token: int,
        force_balanced: bool = False,
        choosing: Choosing = SOFTMAX,
    ) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(experts) if choosing.bias else None)
        choices = Size("choices", experts)
        self.weight = declare(self, "weight", choices, Size("hidden", hidden), role="router")
        biased = choosing.logit_bias
        self.logit_bias = declare(self, "logit_bias", choices, role="vector", initial=0.0) if biased else None
        self.step = StepContext()
        usual = Choosing(renormalise=choosing.renormalise, logit_bias=choosing.logit_bias)
        self.choosing, self._plain = choosing, choosing == usual
        self.experts_per_token = experts_per_token
        self.force_balanced = force_balanced
        self._chosen_E: Tensor | None = None  # how often each expert was, in training since it was asked

    def forward(self, x_TH: Tensor, position_T: Tensor | None = None) -> tuple[Tensor, Tensor, RouterStats]:
        """(weights_TK in x's type, expert indices_TK int64, statistics). Scores and statistics are fp32.

        `position_T`: of every token in its sequence, by default as if all were one sequence.
        """
        logits_TE = self.product(x_TH, self.weight, self.gradients.get(self.weight))
        if self.logit_bias is not None:
            logits_TE = logits_TE + self.logit_bias
        forced_T = self._forced(x_TH, position_T)
        renormalise = self.choosing.renormalise
        if self._plain and backend.use_triton(x_TH):
            from optimus.kernels.triton.router import router

            routed = router(logits_TE, self.experts_per_token, forced_T=forced_T, renormalise=renormalise)
            self.step.chose(self, routed.counts_E)
            stats = RouterStats(routed.counts_E, routed.probabilities_E, routed.z, len(x_TH))
            return routed.weights_TK, routed.indices_TK, stats
        logits_TE = logits_TE.to(compute_dtype(logits_TE.dtype))
        softmax = self.choosing.score == "softmax"
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
        if renormalise and softmax:  # of the logits: all chosen probabilities may be too small for fp32
            weights_TK = logits_TE.gather(1, indices_TK).softmax(-1)
        elif renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if self.choosing.scale != 1:
            weights_TK = weights_TK * self.choosing.scale
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
        """The experts that the tokens choose."""
        groups, chosen = self.choosing.groups, self.choosing.groups_per_token
        if self.bias is not None:
            scores_TE = scores_TE.detach() + self.bias
        if chosen < groups:
            scores_TGE = scores_TE.unflatten(1, (groups, -1))
            best_TG = scores_TGE.topk(2, dim=-1)[0].sum(-1).topk(chosen, dim=-1)[1]
            left_TG = torch.ones_like(scores_TGE[..., 0], dtype=torch.bool).scatter_(1, best_TG, False)
            scores_TE = scores_TGE.masked_fill(left_TG[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(self.experts_per_token, dim=-1)[1]

    def take_choices(self) -> Tensor:
        """How often each expert was chosen in training since this was asked last, int64.

        What was recomputed counts twice, each microbatch alike.
        """
        assert self.bias is not None
        chosen_E, self._chosen_E = self._chosen_E, None
        return torch.zeros_like(self.bias, dtype=torch.int64) if chosen_E is None else chosen_E

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """The bias stays fp32, whatever the type of the weights: its steps are small."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None:
            self.bias = self.bias.float() if bias.is_meta else bias.to(self.bias.device)
        return self

    def _forced(self, x_TH: Tensor, position_T: Tensor | None) -> Tensor | None:
        """The positions of the tokens, where these decide about their experts."""
        if not self.force_balanced:
            return None
        return torch.arange(len(x_TH), device=x_TH.device) if position_T is None else position_T


@torch.no_grad()
def move_biases(routers: Sequence[Router], rate: float, add_up: Callable[[Tensor], None]) -> None:
    """Move the bias of each expert by `rate`, up where it was chosen less often than the mean, down where more often.

    (Auxiliary-loss-free balancing: DeepSeek-V3, section 2.1.2.) `add_up` sums over ranks, in place: to the choices of the
    global batch, and how many times each is counted does not matter. With a `rate` of 0 the choices are forgotten.
    """
    chosen = [router.take_choices() for router in routers]
    if not rate or not chosen:
        return
    counts = torch.cat(chosen)
    add_up(counts)
    for router, counts_E in zip(routers, counts.split([len(each) for each in chosen]), strict=True):
        assert router.bias is not None
        router.bias.add_((counts_E.sum() - counts_E * len(counts_E)).sign(), alpha=rate)
