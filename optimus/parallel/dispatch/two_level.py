"""Two-level dispatch: a token goes once to each node that has any of the token's experts, and there once to each rank
that has any of these experts.

Between nodes, tokens go to the rank with the same local rank, which dispatches the tokens within its node.

Legend: T tokens of this rank, R rows received from all nodes, H hidden, K experts per token, N nodes, M
expert-parallel ranks of a node.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from optimus.comm import Group
from optimus.comm.functional import cached
from optimus.model.moe.choices import choices_of
from optimus.model.moe.dispatch import NOTHING, OverlappedWork
from optimus.parallel.dispatch.alltoall import AllToAllDispatch, ExchangeCounts, needed_by, read_counts


class TwoLevelDispatch:
    """A `TokenDispatcher` over two groups: `across` has one rank of each node, and `within` has M ranks of one node.

    Rank l of `within` on node n of `across` holds `experts_per_rank` experts, from (n M + l) `experts_per_rank` on.
    """

    def __init__(
        self, across: Group, within: Group, experts_per_rank: int, parts: Group, *, duplicates: bool = False
    ) -> None:
        alone = Group([parts.ranks[parts.rank]], 0)  # only `within` combines shards of experts
        self.across = AllToAllDispatch(across, within.size * experts_per_rank, alone)
        self.within = AllToAllDispatch(within, experts_per_rank, parts, duplicates=duplicates)

    def __call__(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        experts: nn.Module,
        overlapped: OverlappedWork = NOTHING,
    ) -> Tensor:
        """Returns [T, H]. The host waits at most once for the counts of both groups."""
        across, within = cached(lambda: read_counts(*self._exchange_counts(indices_TK)), self.across.group)
        on_node = partial(self._on_node, experts, ExchangeCounts(*within))
        return self.across.exchange(x_TH, weights_TK, indices_TK, on_node, ExchangeCounts(*across), overlapped)

    def _on_node(
        self,
        experts: nn.Module,
        counts: ExchangeCounts,
        x_RH: Tensor,
        weights_RK: Tensor,
        local_RK: Tensor,
        _choices: int,
    ) -> Tensor:
        return self.within.exchange(x_RH, weights_RK, local_RK, experts, counts)

    def _exchange_counts(self, indices_TK: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields (sent, received, totals) for `across`, with totals 0, and then for `within`."""
        nodes, ranks = self.across.group.size, self.within.group.size
        rank_TK = indices_TK // self.within.experts_per_rank
        needed_TNM = needed_by(rank_TK, nodes * ranks).view(-1, nodes, ranks)
        choices_NM = choices_of(rank_TK, nodes * ranks).view(nodes, ranks)
        rows_N = needed_TNM.any(2).sum(0)
        send = torch.cat([rows_N[:, None], needed_TNM.sum(0), choices_NM], 1)
        receive = self.across.group.all_to_all(send)
        yield send[:, :2], receive[:, :2], send.new_zeros(1, 2)
        yield self.within.exchange_counts(receive[:, 1:].sum(0).view(2, ranks).T.contiguous())
