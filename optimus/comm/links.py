"""What a message takes between two ranks: of a node, or of two."""

from typing import NamedTuple


class Link(NamedTuple):
    """One direction of a link."""

    latency: float  # seconds
    bandwidth: float  # bytes/s


class Links(NamedTuple):
    """Links of a group's ranks. By default those of a cluster whose nodes talk over TCP, from Python."""

    overhead: float = 20e-6
    """Seconds that a rank is busy with a message, on each side."""
    between: Link = Link(50e-6, 1.25e9)
    """Of an adapter of a node."""
    inside: Link = Link(15e-6, 3e9)
    """Of a rank, to the others of its node."""
    adapters: int = 1
    """Of a node: its ranks share them evenly, neighbours first."""

    def adapter(self, place: int, per: int) -> int:
        """Which one the rank at a place among `per` on a node sends and receives through."""
        return place * self.adapters // per
