"""Groups of ranks along axes of the mesh, and the collectives on them. A group of one needs no process group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.mesh import Mesh


class Group:
    """`ranks` of the job, in order; `rank` is this process's place among them."""

    def __init__(self, ranks: Sequence[int], rank: int, handle: Any = None) -> None:
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.rank = rank
        self._handle = handle

    def start_average(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to replace `tensor` on every rank by its mean over the ranks; calling the result finishes it."""
        if self.size == 1:
            return _nothing
        work = dist.all_reduce(tensor, group=self._handle, async_op=True)

        def finish() -> None:
            work.wait()
            tensor.div_(self.size)

        return finish

    def average(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by its mean over the ranks, in place."""
        self.start_average(tensor)()

    def start_average_part(self, tensor: Tensor, part: slice, out: Tensor) -> Callable[[], None]:
        """Begin to add this rank's `part` of the mean of a flat `tensor` over the ranks (reduce-scatter) to `out`.

        The parts of the ranks are of one size and in rank order. `tensor` must stay as it is until the result is called.
        """
        if self.size == 1:
            out.add_(tensor[part])
            return _nothing
        total = torch.empty_like(tensor[part])
        work = dist.reduce_scatter_tensor(total, tensor, group=self._handle, async_op=True)

        def finish() -> None:
            work.wait()
            out.add_(total, alpha=1 / self.size)

        return finish

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by its sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._handle)

    def gather_parts(self, tensor: Tensor, part: Tensor) -> None:
        """Fill the flat `tensor` with the `part` of every rank, in rank order (all-gather)."""
        if self.size > 1:
            aliased = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            dist.all_gather_into_tensor(tensor, part.clone() if aliased else part, group=self._handle)
        elif part.data_ptr() != tensor.data_ptr():
            tensor.copy_(part)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by that of the group's first rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=self.ranks[0], group=self._handle)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether `flag` is set on any rank, so that all ranks take the same turn; `device` is what the group moves."""
        if self.size == 1:
            return flag
        one = torch.tensor(int(flag), device=device)
        dist.all_reduce(one, op=dist.ReduceOp.MAX, group=self._handle)
        return bool(one.item())


class Groups:
    """The groups of this rank, made once per set of axes and shared by all who ask."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._made: dict[frozenset[str], Group] = {}

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.along("pp", "dp", "cp", "tp")

    def along(self, *axes: str) -> Group:
        """The ranks that differ from this one on `axes` only. All ranks must ask for new groups in the same order."""
        key = frozenset(axes)
        if key not in self._made:
            self._made[key] = self._make(axes)
        return self._made[key]

    def _make(self, axes: Sequence[str]) -> Group:
        ranks = self.mesh.group(self.rank, axes)
        handle = None
        if 1 < len(ranks) < self.mesh.size:
            handles = {group[0]: dist.new_group(group) for group in self.mesh.groups(axes)}
            handle = handles[ranks[0]]
        return Group(ranks, ranks.index(self.rank), handle)


def _nothing() -> None:
    """A group of one has nothing to finish."""
