"""Where the ranks of a group lie, in numbers: every so-many-th rank of the job."""

from functools import lru_cache
from typing import NamedTuple

from optimus.mesh.mesh import Mesh


class StridedGroup(NamedTuple):
    """A group of `size` ranks, each `stride` after the one before: the ranks on the inner axes of the mesh lie between.

    Where the stages of a pipeline lie side by side, only `near` of them do, and the next so many begin `far` after those.
    """

    size: int
    stride: int = 1
    near: int = 0
    far: int = 0

    @property
    def span(self) -> int:
        """Ranks from the first to the first of the next such group."""
        return self.size // self.near * self.far if self.near else self.size * self.stride

    def on_a_node(self, ranks_per_node: int) -> int:
        """How many of the ranks share a node."""
        near = self.near or self.size
        here = min(near, max(1, ranks_per_node // self.stride))
        if self.near and here == near:
            here *= min(self.size // near, max(1, ranks_per_node // self.far))
        return here

    def nodes(self, ranks_per_node: int) -> int:
        """Over how many nodes they lie."""
        return -(-self.size // self.on_a_node(ranks_per_node))

    def groups_on_a_node(self, ranks_per_node: int) -> int:
        """Groups of its kind that leave each node."""
        if self.near and self.near * self.stride <= ranks_per_node:
            return max(1, ranks_per_node // self.on_a_node(ranks_per_node))
        return min(ranks_per_node, self.stride)

    def inner(self, count: int) -> "StridedGroup":
        """The first `count` of the ranks, and each `count` that follow."""
        if not self.near or count > self.near:
            return self._replace(size=count)
        return StridedGroup(count, self.stride)

    def outer(self, count: int) -> "StridedGroup":
        """Every `count`-th of the ranks."""
        if not self.near:
            return StridedGroup(self.size // count, self.stride * count)
        if count >= self.near:
            return StridedGroup(self.size // count, self.far * count // self.near)
        return StridedGroup(self.size // count, self.stride * count, self.near // count, self.far)


@lru_cache(maxsize=8192)
def group_along(mesh: Mesh, axes: tuple[str, ...]) -> StridedGroup:
    """That of rank 0 along `axes` of `mesh`; the others' lie alike. Ranks between its own are on inner axes."""
    if axes == ("pp",):
        return StridedGroup(mesh.pp, mesh.block)
    inner = {
        "tp_out": 1,
        "tp_in": mesh.tp_out,
        "cp": mesh.tp,
        "dp": mesh.tp * mesh.cp,
        "etp": 1,
        "ep": mesh.etp,
        "edp": mesh.etp * mesh.ep,
    }
    size, stride = mesh.axis_size(*axes), min(inner[axis] for axis in axes)
    near = mesh.block // stride
    if size <= near:
        return StridedGroup(size, stride)
    far = mesh.block * mesh.pp
    return StridedGroup(size, stride, near, far) if near > 1 else StridedGroup(size, far)
