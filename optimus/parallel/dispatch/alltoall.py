"""Each token once to every rank that holds one of its experts, however many of them it holds.

A token takes all its routing weights and choices along, so the rank of the experts returns one row per token that it got:
the weighted sum over the experts there. At home the rows of a token are added in rank order. Copies of tokens are laid out
by an index, and put together again by sums over its inverse; each is the other's backward pass. So nothing is scattered,
and every addition has a fixed order.

Legend: N ranks of the group, T tokens of this rank, S copies sent, R copies received, H hidden, K experts per token.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.comm import Group
from optimus.comm.functional import (
    all_gather,
    all_gather_uneven_rows,
    all_to_all_rows_async,
    cached,
    copy_to_group,
    reduce_from_group,
    reduce_scatter_uneven_rows,
)
from optimus.model.moe.choices import choices_of, local_indices
from optimus.model.moe.dispatch import NOTHING, Overlapped

Compute = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens, weights, local choices, number of these that are here) to weighted sums of what their experts give: a module, or
one more dispatcher."""


class Copies(NamedTuple):
    """The copies of tokens that leave, by rank and then by token; and where the copies of each token are."""

    token_S: Tensor  # the token of each copy
    copy_S: Tensor  # copies by token and then by rank
    first_T: Tensor  # where in `copy_S` those of a token begin


def needed_by(rank_TK: Tensor, ranks: int) -> Tensor:
    """[T, N]: whether a token goes to a rank, from the rank of each choice, or -1; K choices of one rank are one copy."""
    needed_TN = torch.zeros(len(rank_TK), 1 + ranks, dtype=torch.bool, device=rank_TK.device)
    return needed_TN.scatter_(1, rank_TK + 1, True)[:, 1:]


def make_copies(needed_TN: Tensor, number: int) -> Copies:
    """The copies to make, of which there are this `number`: as the host knows it, nothing has to wait for the device."""
    tokens, ranks = needed_TN.shape
    needed_NT = needed_TN.T
    number_NT = needed_NT.flatten().cumsum(0).view(ranks, tokens) - 1
    count_T = needed_TN.sum(1)
    token_NT = torch.arange(tokens, device=needed_TN.device).expand(ranks, -1)
    return Copies(
        token_S=_packed(token_NT, needed_NT, number),
        copy_S=_packed(number_NT.T, needed_TN, number),
        first_T=count_T.cumsum(0) - count_T,
    )


def _packed(values: Tensor, chosen: Tensor, number: int) -> Tensor:
    """The `number` values that are chosen, in order."""
    place = (chosen.flatten().cumsum(0) - 1).masked_fill_(~chosen.flatten(), number)
    return values.new_empty(number + 1).scatter_(0, place, values.flatten())[:number]


class ExchangeCounts(NamedTuple):
    """What the host knows of an exchange: rows for and from each rank, and how many experts compute for: tokens of each of
    the ranks that share experts, and the choices of all of these that are here."""

    send: list[int]
    receive: list[int]
    tokens: list[int]
    choices: int


class AllToAllDispatch:
    """A `Dispatch` over the ranks of `group`, which hold `experts_per_rank` experts each, in rank order.

    Experts may be split over `parts`, each rank of which has its own such group: what one of them got from there all
    gather, and add up what their parts of the experts find (TED, section 7.2, algorithm 5's dropped tokens being those that
    the others sent). With `duplicates` they all sent and got the same, and only add up. T may differ from rank to rank, and
    be 0. What a layer computes besides goes on while tokens are under way (Megatron-Core's overlap of shared experts), in
    the backward pass as well.
    """

    def __init__(self, group: Group, experts_per_rank: int, parts: Group, *, duplicates: bool = False) -> None:
        self.group, self.parts = group, parts
        self.experts_per_rank = experts_per_rank
        self.duplicates = duplicates

    def __call__(
        self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: Compute, overlapped: Overlapped = NOTHING
    ) -> Tensor:
        """Counts, which the host waits for, then tokens, weights and choices, then results: five all-to-all. The result is
        [T, H]."""
        rank_TK = indices_TK // self.experts_per_rank
        rows_N = needed_by(rank_TK, self.group.size).sum(0)
        rows_N2 = torch.stack([rows_N, choices_of(rank_TK, self.group.size)], 1)
        (counts,) = cached(lambda: read_counts(self.exchange_counts(rows_N2)), self.group)
        return self.exchange(x_TH, weights_TK, indices_TK, experts, ExchangeCounts(*counts), overlapped)

    def exchange_counts(self, send_N2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From rows and choices for each rank: the same, those from each rank, and what each of the parts gets."""
        receive_N2 = self.group.all_to_all(send_N2)
        totals_P2 = receive_N2.sum(0, keepdim=True)
        if self.parts.size > 1 and not self.duplicates:
            totals_P2 = all_gather(totals_P2, self.parts)
        return send_N2, receive_N2, totals_P2

    def exchange(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        experts: Compute,
        counts: ExchangeCounts,
        overlapped: Overlapped = NOTHING,
    ) -> Tensor:
        """What follows when the counts are known."""
        send, receive, tokens, choices = counts
        copies = make_copies(needed_by(indices_TK // self.experts_per_rank, self.group.size), sum(send))
        chosen_SK = indices_TK.int()[copies.token_S]  # int32: half the bytes
        leaving = _Copied.apply(x_TH, copies, False), _Copied.apply(weights_TK, copies, False), chosen_SK
        arriving = [all_to_all_rows_async(rows, send, receive, self.group) for rows in leaving]
        del leaving, chosen_SK
        overlapped.during_dispatch()
        x_RH, weights_RK, indices_RK = (rows.wait() for rows in arriving)
        local_RK = local_indices(indices_RK, self.group.rank * self.experts_per_rank, self.experts_per_rank)
        y_RH = self._with_all_parts(x_RH, weights_RK, local_RK, experts, tokens, choices)
        returning = all_to_all_rows_async(y_RH, receive, send, self.group)
        overlapped.during_combine()
        return _Copied.apply(returning.wait(), copies, True)

    def _with_all_parts(
        self,
        x_RH: Tensor,
        weights_RK: Tensor,
        local_RK: Tensor,
        experts: Compute,
        tokens: Sequence[int],
        choices: int,
    ) -> Tensor:
        """What whole experts give for these tokens."""
        if self.parts.size == 1:
            return experts(x_RH, weights_RK, local_RK, choices)
        if self.duplicates:
            given = copy_to_group(x_RH, self.parts), copy_to_group(weights_RK, self.parts)
            return reduce_from_group(experts(*given, local_RK, choices), self.parts)
        x, weights, local = (
            all_gather_uneven_rows(rows_R, tokens, self.parts) for rows_R in (x_RH, weights_RK, local_RK)
        )
        return reduce_scatter_uneven_rows(experts(x, weights, local, choices), tokens, self.parts)


def read_counts(*exchanges: tuple[Tensor, Tensor, Tensor]) -> tuple[ExchangeCounts, ...]:
    """What the host is to know of these exchanges (`exchange_counts`); it waits for the device once."""
    flat = [each.flatten() for exchange in exchanges for each in exchange]
    numbers = [each.tolist() for each in torch.cat(flat).cpu().split([len(each) for each in flat])]
    return tuple(
        ExchangeCounts(send[::2], receive[::2], totals[::2], sum(totals[1::2]))
        for send, receive, totals in zip(numbers[::3], numbers[1::3], numbers[2::3])
    )


class _Copied(torch.autograd.Function):
    """[T, ...] to [S, ...], a row for every copy; or with `collects` back, the sum of each token's copies in rank order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies, collects: bool) -> Tensor:
        ctx.copies, ctx.collects = copies, collects
        return _copied(rows, copies, collects)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _copied(grads[0], ctx.copies, not ctx.collects), None, None


def _copied(rows: Tensor, copies: Copies, collects: bool) -> Tensor:
    return F.embedding_bag(copies.copy_S, rows, copies.first_T, mode="sum") if collects else rows[copies.token_S]
