"""Groups of ranks, described by a size and by strides between ranks."""

from functools import lru_cache
from typing import NamedTuple

from optimus.mesh.mesh import Mesh, view_of


class StridedGroup(NamedTuple):
    """A group of `size` ranks, each `stride` after the previous rank.

    If `near` is not 0, the group consists of runs of `near` ranks. The stride then applies within a run, and each run
    begins `far` ranks after the beginning of the previous run.
    """

    size: int
    stride: int = 1
    near: int = 0
    far: int = 0

    @property
    def span(self) -> int:
        """Distance in ranks from this group to the next group that does not interleave with this group."""
        return self.size // self.near * self.far if self.near else self.size * self.stride

    def on_a_node(self, ranks_per_node: int) -> int:
        """Returns the largest number of the group's ranks on one node.

        The number is an estimate if a stride neither divides `ranks_per_node` nor is a multiple of it.
        """
        near = self.near or self.size
        here = min(near, max(1, ranks_per_node // self.stride))
        if self.near and here == near:
            here *= min(self.size // near, max(1, ranks_per_node // self.far))
        return here

    def nodes(self, ranks_per_node: int) -> int:
        """Returns the number of nodes that the group spans.

        The number is an estimate if `on_a_node` returns an estimate, or if the nodes have unequal numbers of the ranks.
        """
        return -(-self.size // self.on_a_node(ranks_per_node))

    def groups_on_a_node(self, ranks_per_node: int) -> int:
        """Returns the largest number of groups with ranks on a node, if all groups have this size and these strides.

        The group must span several nodes. Groups that do not fill whole nodes meet on one: `stride` groups end there, and as
        many begin.
        """
        if self.near and self.near * self.stride <= ranks_per_node:
            return max(1, ranks_per_node // self.on_a_node(ranks_per_node))
        meet = 1 if self.near or self.span % ranks_per_node == 0 else 2
        return min(ranks_per_node, meet * self.stride)

    def inner(self, count: int) -> "StridedGroup":
        """Returns the subgroup of the first `count` ranks."""
        if not self.near or count > self.near:
            return self._replace(size=count)
        return StridedGroup(count, self.stride)

    def outer(self, count: int, run: int = 1) -> "StridedGroup":
        """Returns the subgroup of every `count`-th rank, or of every `count`-th run of `run` ranks.

        Two strides approximate a subgroup that needs three strides.
        """
        if count == 1:
            return self
        if run * count == self.size:
            return self.inner(run)
        if run > 1:
            if run == self.near:
                return self._replace(size=self.size // count, far=self.far * count)
            apart = run * count
            far = self.far * apart // self.near if self.near and apart >= self.near else self.stride * apart
            return StridedGroup(self.size // count, self.stride, run, far)
        if not self.near:
            return StridedGroup(self.size // count, self.stride * count)
        if count >= self.near:
            return StridedGroup(self.size // count, self.far * count // self.near)
        return StridedGroup(self.size // count, self.stride * count, self.near // count, self.far)


@lru_cache(maxsize=8192)
def group_along(mesh: Mesh, axes: tuple[str, ...]) -> StridedGroup:
    """Returns the group of rank 0 along `axes` of `mesh`. Two strides approximate a group that needs three strides.

    Raises `ValueError` unless `axes` are `pp` alone, or other axes of one view.
    """
    if axes == ("pp",):
        return StridedGroup(mesh.pp, mesh.block)
    wanted = {one for axis in axes for one in (("tp_in", "tp_out") if axis == "tp" else (axis,))}
    view = view_of(axes)
    if not wanted or not wanted <= set(view[1:]):
        raise ValueError(f"axes {', '.join(axes) or '()'}: give pp alone, or other axes of one view")
    inner = {axis: mesh.axis_size(*view[at:]) for at, axis in enumerate(view, start=1)}
    runs = [(1, min(inner[axis] for axis in wanted))]  # (size, stride), the innermost first
    for axis in sorted(wanted, key=inner.__getitem__):
        (size, stride), longer = runs[-1], mesh.axis_size(axis)
        if size == 1 or inner[axis] == size * stride:
            runs[-1] = size * longer, inner[axis] if size == 1 and longer > 1 else stride
        elif longer > 1:
            runs.append((longer, inner[axis]))
    size, stride = runs[0]
    if len(runs) > 1:
        number, far = runs[1]
        return StridedGroup(size * number, stride, size, far if far < mesh.block else far * mesh.pp)
    near = mesh.block // stride
    if size <= near:
        return StridedGroup(size, stride)
    far = mesh.block * mesh.pp
    return StridedGroup(size, stride, near, far) if near > 1 else StridedGroup(size, far)
