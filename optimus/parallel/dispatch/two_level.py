"""Each token once to every node that has one of its experts, and there once to every rank that holds one.

Between nodes tokens go to the rank of their own rank's place, so that all ranks of a node send and receive. It dispatches
them on its node, and sends back the sum of what its node's experts find. So one row of a token crosses each way, however
many of a node's ranks hold experts that it has chosen.
"""

from functools import partial

from torch import Tensor, nn

from optimus.comm import Group
from optimus.parallel.dispatch.alltoall import AllToAllDispatch


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

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: nn.Module) -> Tensor:
        """Ten all-to-all, half of them on the node. The result is [T, H]."""
        return self.across(x_TH, weights_TK, indices_TK, partial(self.within, experts=experts))
