"""Latency, bandwidth and overhead of messages between two ranks, within a node or across nodes."""

from typing import NamedTuple


class Link(NamedTuple):
    """Latency and bandwidth of one direction of a link."""

    latency: float  # seconds
    bandwidth: float  # bytes/s


class Links(NamedTuple):
    """The links of a group's ranks, by default of nodes that communicate over TCP from Python."""

    overhead: float = 20e-6
    """Seconds that a message keeps its sender busy, and likewise its receiver."""
    between: Link = Link(50e-6, 1.25e9)
    """The link of one network adapter of a node."""
    inside: Link = Link(15e-6, 3e9)
    """The link of a rank to the other ranks of its node."""
    adapters: int = 1
    """Number of network adapters of a node. Consecutive ranks of the node share an adapter."""

    def adapter(self, local_rank: int, per: int) -> int:
        """Returns the index of the adapter that `local_rank` uses, on a node with `per` ranks."""
        return local_rank * self.adapters // per
