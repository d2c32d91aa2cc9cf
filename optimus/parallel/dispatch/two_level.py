"""Each token once to every node that has one of its experts, and there once to every rank that holds one.

Between nodes tokens go to the rank of their own rank's place, so that all ranks of a node send and receive. It dispatches
them on its node, and sends back the sum of what its node's experts find. So one row of a token crosses each way, however
many of a node's ranks hold experts that it has chosen.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from optimus.comm import Group
from optimus.comm.functional import cached
from optimus.model.moe.choices import choices_of
from optimus.model.moe.dispatch import NOTHING, Overlapped
from optimus.parallel.dispatch.alltoall import AllToAllDispatch, ExchangeCounts, needed_by, read_counts


class TwoLevelDispatch:
    """A `Dispatch` over ranks `across` nodes, each of which dispatches to those `within` its own.

    Rank l of node x holds experts (x M + l) E / N M, of M ranks a node; each rank holds `experts_per_rank`.
    """

    def __init__(
        self, across: Group, within: Group, experts_per_rank: int, parts: Group, *, duplicates: bool = False
    ) -> None:
        alone = Group([parts.ranks[parts.rank]], 0)  # parts of experts are put together on their node
        self.across = AllToAllDispatch(across, within.size * experts_per_rank, alone)
        self.within = AllToAllDispatch(within, experts_per_rank, parts, duplicates=duplicates)

    def __call__(
        self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: nn.Module, overlapped: Overlapped = NOTHING
    ) -> Tensor:
        """Ten all-to-all, half of them on the node; the host waits for the counts of both levels at once. The result is
        [T, H]."""
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
        """Of both levels. What this rank will send on its node is what comes from others, which tell of it."""
        nodes, ranks = self.across.group.size, self.within.group.size
        rank_TK = indices_TK // self.within.experts_per_rank
        needed_TNM = needed_by(rank_TK, nodes * ranks).view(-1, nodes, ranks)
        choices_NM = choices_of(rank_TK, nodes * ranks).view(nodes, ranks)
        rows_N = needed_TNM.any(2).sum(0)
        send = torch.cat([rows_N[:, None], needed_TNM.sum(0), choices_NM], 1)
        receive = self.across.group.all_to_all(send)
        yield send[:, :2], receive[:, :2], send.new_zeros(1, 2)  # of which the second numbers are of no use
        yield self.within.exchange_counts(receive[:, 1:].sum(0).view(2, ranks).T.contiguous())
