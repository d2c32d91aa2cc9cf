"""All-gather dispatch: every rank gets every token and runs its own experts (Optimus paper, section 3.1, stage 1).

Legend: N ranks of the group, T tokens of this rank, A = N * T, H hidden, K experts per token.
"""

from torch import Tensor, nn

from optimus.comm import Group
from optimus.comm.functional import all_gather_rows, cached, reduce_scatter_rows
from optimus.model.moe.choices import local_indices
from optimus.model.moe.dispatch import NOTHING, OverlappedWork


class AllGatherDispatch:
    """A `TokenDispatcher` over the ranks of `group`; this rank holds `experts_per_rank` experts from `first` on, or
    shards of these experts.

    T must be equal on all ranks.
    """

    def __init__(self, group: Group, first: int, experts_per_rank: int) -> None:
        self.group = group
        self.first, self.experts_per_rank = first, experts_per_rank

    def __call__(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        experts: nn.Module,
        overlapped: OverlappedWork = NOTHING,
    ) -> Tensor:
        """Returns the combined outputs of all experts [T, H] (Optimus paper, Algorithm 1, lines 11-13 and 116)."""
        x_AH = all_gather_rows(x_TH, self.group)
        weights_AK = all_gather_rows(weights_TK, self.group)
        indices_AK = all_gather_rows(indices_TK.int(), self.group)  # half the bytes of int64
        local_AK = local_indices(indices_AK, self.first, self.experts_per_rank)
        choices = cached(lambda: self.count_local_choices(local_AK), self.group)
        y_TH = reduce_scatter_rows(experts(x_AH, weights_AK, local_AK, choices), self.group)
        overlapped.at_once()
        return y_TH

    def count_local_choices(self, local_AK: Tensor) -> int:
        """Counts the choices of this rank's experts; the host waits for the device."""
        return int((local_AK >= 0).sum())
