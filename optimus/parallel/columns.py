"""Collectives for activations whose columns are sharded over tensor-parallel ranks."""

from torch import Tensor

from optimus.comm import Group, Groups
from optimus.comm.functional import all_reduce_autograd, copy_to_group, join_rows, reduce_from_group, split_rows
from optimus.model.foreign.columns import WHOLE, Columns


class SplitColumns(Columns):
    """`Columns` sharded over `group`."""

    def __init__(self, group: Group) -> None:
        self.size, self._group = group.size, group

    def enter(self, x: Tensor) -> Tensor:
        return copy_to_group(x, self._group)

    def leave(self, y: Tensor) -> Tensor:
        return reduce_from_group(y, self._group)

    def mean(self, m: Tensor) -> Tensor:
        return all_reduce_autograd(m, self._group) / self.size

    def join(self, y_TH: Tensor) -> Tensor:
        return join_rows(y_TH.t().contiguous(), self._group).t()

    def split(self, x_TH: Tensor) -> Tensor:
        return split_rows(x_TH.t(), self._group).t()


def columns_of(groups: Groups) -> Columns:
    """Returns `Columns` sharded over the ranks along `tp_out`."""
    group = groups.along("tp_out")
    return WHOLE if group.size == 1 else SplitColumns(group)
