"""Each token once to every rank that holds one of its experts, however many of them it holds.

A token takes all its routing weights and choices along, so the rank of the experts returns one row per token that it got:
the weighted sum over the experts there. At home the rows of a token are added in rank order. Copies of tokens are laid out
by an index, and put together again by sums over its inverse; each is the other's backward pass. So nothing is scattered,
and every addition has a fixed order.

Legend: N ranks of the group, T tokens of this rank, S copies sent, R copies received, H hidden, K experts per token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.comm import Group
from optimus.comm.functional import (
    all_gather_uneven_rows,
    all_to_all_rows,
    cached,
    copy_to_group,
    reduce_from_group,
    reduce_scatter_uneven_rows,
)
from optimus.model.moe.dispatch import local_indices

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens, weights, local choices) to weighted sums of what their experts give: a module, or one more dispatcher."""


class Copies(NamedTuple):
    """The copies of tokens that leave, by rank and then by token; and where the copies of each token are."""

    token_S: Tensor  # the token of each copy
    count_N: Tensor  # copies per rank
    copy_S: Tensor  # copies by token and then by rank
    first_T: Tensor  # where in `copy_S` those of a token begin


def make_copies(rank_TK: Tensor, ranks: int) -> Copies:
    """The copies to make, from the rank of each choice, or -1; K choices of one rank are one copy."""
    needed_TN = torch.zeros(len(rank_TK), 1 + ranks, dtype=torch.bool, device=rank_TK.device).scatter_(
        1, rank_TK + 1, True
    )
    needed_NT = needed_TN[:, 1:].T
    number_NT = needed_NT.flatten().cumsum(0).view_as(needed_NT) - 1
    count_T = needed_NT.sum(0)
    return Copies(
        token_S=needed_NT.nonzero()[:, 1],
        count_N=needed_NT.sum(1),
        copy_S=number_NT.T[needed_NT.T],
        first_T=count_T.cumsum(0) - count_T,
    )


class AllToAllDispatch:
    """A `Dispatch` over the ranks of `group`, which hold `experts_per_rank` experts each, in rank order.

    Experts may be split over `parts`, each rank of which has its own such group: what one of them got from there all
    gather, and add up what their parts of the experts find (TED, section 7.2, algorithm 5's dropped tokens being those that
    the others sent). With `duplicates` they all sent and got the same, and only add up. T may differ from rank to rank, and
    be 0.
    """

    def __init__(self, group: Group, experts_per_rank: int, parts: Group, *, duplicates: bool = False) -> None:
        self.group, self.parts = group, parts
        self.experts_per_rank = experts_per_rank
        self.duplicates = duplicates

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: Compute) -> Tensor:
        """Counts, then tokens, weights and choices, then results: five all-to-all. The result is [T, H]."""
        copies = make_copies(indices_TK // self.experts_per_rank, self.group.size)
        send, receive = self._counts(copies.count_N)
        x_RH = all_to_all_rows(_Spread.apply(x_TH, copies), send, receive, self.group)
        weights_RK = all_to_all_rows(_Spread.apply(weights_TK, copies), send, receive, self.group)
        leaving_SK = indices_TK.int()[copies.token_S]  # int32: half the bytes
        indices_RK = cached(lambda: self.group.all_to_all(leaving_SK, send, receive), self.group)
        local_RK = local_indices(indices_RK, self.group.rank * self.experts_per_rank, self.experts_per_rank)
        y_RH = self._with_all_parts(x_RH, weights_RK, local_RK, experts)
        return _Collect.apply(all_to_all_rows(y_RH, receive, send, self.group), copies)

    def _with_all_parts(self, x_RH: Tensor, weights_RK: Tensor, local_RK: Tensor, experts: Compute) -> Tensor:
        """What whole experts give for these tokens."""
        if self.parts.size == 1:
            return experts(x_RH, weights_RK, local_RK)
        if self.duplicates:
            return reduce_from_group(
                experts(copy_to_group(x_RH, self.parts), copy_to_group(weights_RK, self.parts), local_RK), self.parts
            )
        rows = cached(lambda: self.parts.all_gather_object(len(x_RH)), self.parts)
        given = [all_gather_uneven_rows(rows_R, rows, self.parts) for rows_R in (x_RH, weights_RK, local_RK)]
        return reduce_scatter_uneven_rows(experts(*given), rows, self.parts)

    def _counts(self, send_N: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to each rank, and how many come from it."""
        receive_N = cached(lambda: self.group.all_to_all(send_N), self.group)
        send, receive = torch.stack([send_N, receive_N]).tolist()
        return send, receive


def _collected(rows: Tensor, copies: Copies) -> Tensor:
    """[S, ...] to [T, ...]: the sum of each token's copies, in rank order."""
    return F.embedding_bag(copies.copy_S, rows, copies.first_T, mode="sum")


class _Spread(torch.autograd.Function):
    """[T, ...] to [S, ...]: a row for every copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return rows[copies.token_S]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _collected(grads[0], ctx.copies), None


class _Collect(torch.autograd.Function):
    """[S, ...] to [T, ...]: the sum over the copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return _collected(rows, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.copies.token_S], None
