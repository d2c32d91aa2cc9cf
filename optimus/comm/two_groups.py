"""Collectives on two levels as collectives of two groups, for backends with algorithms of their own.

NCCL's algorithm of few steps (PAT) runs only in groups with one rank on each node (PCCL, arXiv 2504.18658): those `across`
nodes have. `within` are the ranks of this one's node. All ranks begin the two in the same order.

Legend: N nodes, M ranks on each, S elements of a part.
"""

from typing import Protocol

from torch import Tensor

from optimus.comm.handle import Handle


class Level(Protocol):
    """What is asked of the group of a level: `comm.group.Group`."""

    @property
    def size(self) -> int:
        """Ranks."""

    @property
    def rank(self) -> int:
        """Of this process in the group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """As `Group.all_reduce`."""

    def all_gather(self, tensor: Tensor, part: Tensor) -> None:
        """As `Group.all_gather`."""

    def all_gather_async(self, tensor: Tensor, part: Tensor) -> Handle:
        """As `Group.all_gather_async`."""

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> None:
        """As `Group.reduce_scatter`."""

    def reduce_scatter_async(self, tensor: Tensor, out: Tensor) -> Handle:
        """As `Group.reduce_scatter_async`."""

    def all_to_all(self, rows: Tensor) -> Tensor:
        """As `Group.all_to_all`."""

    def all_to_all_async(self, rows: Tensor) -> tuple[Tensor, Handle]:
        """As `Group.all_to_all_async`."""


def all_gather_in_two_groups(tensor: Tensor, part: Tensor, across: Level, within: Level) -> Handle:
    """Begin to fill `tensor` with the `part` of every rank: between nodes, on the node, then in the order of the ranks."""
    part_S = part.reshape(-1)
    of_place_NS = part_S.new_empty(across.size, len(part_S))
    between = across.all_gather_async(of_place_NS.view(-1), part_S)

    def finish() -> None:
        between.wait()
        all_MNS = of_place_NS.new_empty(within.size, *of_place_NS.shape)
        within.all_gather(all_MNS.view(-1), of_place_NS.view(-1))
        tensor.view(across.size, within.size, -1).copy_(all_MNS.transpose(0, 1))

    return Handle(finish)


def reduce_scatter_in_two_groups(tensor: Tensor, out: Tensor, across: Level, within: Level) -> Handle:
    """Begin to fill `out` with this rank's part of the sum of `tensor`: on the node, then between nodes."""
    all_MNS = tensor.view(across.size, within.size, -1).transpose(0, 1).contiguous()
    of_place_NS = all_MNS.new_empty(all_MNS.shape[1:])
    inside = within.reduce_scatter_async(all_MNS.view(-1), of_place_NS.view(-1))

    def finish() -> None:
        inside.wait()
        across.reduce_scatter(of_place_NS.view(-1), out.view(-1))

    return Handle(finish)


def all_reduce_in_two_groups(tensor: Tensor, across: Level, within: Level) -> Handle:
    """Begin to replace `tensor` by its sum: parts of it on the node, each of which is summed between nodes."""
    flat = tensor.view(-1)
    part = flat.chunk(within.size)[within.rank]
    inside = within.reduce_scatter_async(flat, part)

    def finish() -> None:
        inside.wait()
        across.all_reduce(part)
        within.all_gather(flat, part)

    return Handle(finish)


def all_to_all_in_two_groups(rows: Tensor, out: Tensor, across: Level, within: Level) -> Handle:
    """Begin to send an equal part of `rows` to every rank: to the rank of the receiver's place on the node, then between
    nodes."""
    to_NMS = rows.view(across.size, within.size, -1)
    here_MNS, inside = within.all_to_all_async(to_NMS.transpose(0, 1))  # what goes to this one's place on its node

    def finish() -> None:
        inside.wait()
        out.view_as(to_NMS).copy_(across.all_to_all(here_MNS.transpose(0, 1)))

    return Handle(finish)
