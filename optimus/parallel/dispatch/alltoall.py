"""All-to-all dispatch: each token goes once to every rank that holds any of the token's experts.

A rank returns one row per received token: the weighted sum over the rank's experts.

Legend: N ranks of the group, T tokens of this rank, S copies sent, R copies received, H hidden, K experts per token, P
ranks of `parts`.
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
from optimus.model.moe.dispatch import NOTHING, OverlappedWork

Compute = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""A function that maps (tokens, weights, local choices, number of local choices) to weighted sums of the experts'
outputs."""


class Copies(NamedTuple):
    """The copies of tokens to send, sorted by (rank, token)."""

    token_S: Tensor  # the token of each copy
    copy_S: Tensor  # the indices of the copies, sorted by (token, rank)
    first_T: Tensor  # index in `copy_S` of each token's first copy


def needed_by(rank_TK: Tensor, ranks: int) -> Tensor:
    """Returns a mask [T, N] of the ranks that each token goes to. `rank_TK` is the rank of each choice, or -1 for no
    rank."""
    needed_TN = torch.zeros(len(rank_TK), 1 + ranks, dtype=torch.bool, device=rank_TK.device)
    return needed_TN.scatter_(1, rank_TK + 1, True)[:, 1:]


def make_copies(needed_TN: Tensor, number: int) -> Copies:
    """Returns the copies for the mask `needed_TN`. The host does not wait for the device.

    `number` must be the number of True elements of the mask.
    """
    tokens, ranks = needed_TN.shape
    needed_NT = needed_TN.T
    number_NT = needed_NT.flatten().cumsum(0).view(ranks, tokens) - 1
    count_T = needed_TN.sum(1)
    token_NT = torch.arange(tokens, device=needed_TN.device).expand(ranks, -1)
    return Copies(
        token_S=_selected(token_NT, needed_NT, number),
        copy_S=_selected(number_NT.T, needed_TN, number),
        first_T=count_T.cumsum(0) - count_T,
    )


def _selected(values: Tensor, chosen: Tensor, number: int) -> Tensor:
    target = (chosen.flatten().cumsum(0) - 1).masked_fill_(~chosen.flatten(), number)
    return values.new_empty(number + 1).scatter_(0, target, values.flatten())[:number]


class ExchangeCounts(NamedTuple):
    """The counts for one dispatch and combine, on the host.

    `send` and `receive` are the numbers of rows sent to and received from each rank. `tokens` are the numbers of tokens
    that each rank with shards of the same experts receives; with `duplicates`, the number of this rank alone. `choices`
    is the number of these tokens' choices of local experts. Between nodes, `TwoLevelDispatch` uses neither `tokens` nor
    `choices`.
    """

    send: list[int]
    receive: list[int]
    tokens: list[int]
    choices: int


class AllToAllDispatch:
    """A `TokenDispatcher` over the ranks of `group`, which hold `experts_per_rank` experts each, in rank order.

    The group `parts` may shard the experts (dissertation on AxoNN, section 7.3.1). With `duplicates`, all ranks of
    `parts` send and receive the same tokens. T may differ between ranks, and may be 0. `overlapped` computation runs
    during communication (Megatron-Core's overlap of shared experts).
    """

    def __init__(self, group: Group, experts_per_rank: int, parts: Group, *, duplicates: bool = False) -> None:
        self.group, self.parts = group, parts
        self.experts_per_rank = experts_per_rank
        self.duplicates = duplicates

    def __call__(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        experts: Compute,
        overlapped: OverlappedWork = NOTHING,
    ) -> Tensor:
        """Returns [T, H], by five all-to-alls over `group`. The host waits for the counts.

        Recomputation with a collective cache needs neither the all-to-alls nor the wait.
        """
        rank_TK = indices_TK // self.experts_per_rank
        rows_N = needed_by(rank_TK, self.group.size).sum(0)
        rows_N2 = torch.stack([rows_N, choices_of(rank_TK, self.group.size)], 1)
        (counts,) = cached(lambda: read_counts(self.exchange_counts(rows_N2)), self.group)
        return self.exchange(x_TH, weights_TK, indices_TK, experts, ExchangeCounts(*counts), overlapped)

    def exchange_counts(self, send_N2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchanges the counts (rows, choices) with each rank.

        Returns the sent counts, the received counts, and the received totals of the ranks of `parts`; with `duplicates`
        the total of this rank alone.
        """
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
        overlapped: OverlappedWork = NOTHING,
    ) -> Tensor:
        """Dispatches and combines with known `counts`, by four all-to-alls over `group`."""
        send, receive, tokens, choices = counts
        copies = make_copies(needed_by(indices_TK // self.experts_per_rank, self.group.size), sum(send))
        chosen_SK = indices_TK.int()[copies.token_S]  # int32: half the bytes
        sending = _Copied.apply(x_TH, copies, False), _Copied.apply(weights_TK, copies, False), chosen_SK
        arriving = [all_to_all_rows_async(rows, send, receive, self.group) for rows in sending]
        del sending, chosen_SK
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
    """Copies the results of `exchange_counts` to the host, which waits for the device once."""
    flat = [each.flatten() for exchange in exchanges for each in exchange]
    numbers = [each.tolist() for each in torch.cat(flat).cpu().split([len(each) for each in flat])]
    return tuple(
        ExchangeCounts(send[::2], receive[::2], totals[::2], sum(totals[1::2]))
        for send, receive, totals in zip(numbers[::3], numbers[1::3], numbers[2::3])
    )


class _Copied(torch.autograd.Function):
    """Maps rows [T, ...] to their copies [S, ...]; with `collects`, maps [S, H] to [T, H]: sums each token's copies in
    rank order."""

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
