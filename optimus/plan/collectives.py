"""Seconds of collectives, by the place of a group's ranks (the dissertation on AxoNN, section 5.1.2).

Equations 5.1 to 5.5 say what a ring moves, case 1 and equation 5.7 how fast its links are. To these are added what the
dissertation leaves out, as it looks at large messages only: the latency of each step, algorithms with fewer steps where that
is cheaper, and a network that is thinner between distant nodes.
"""

import math
from typing import Literal, NamedTuple

from optimus.plan.machine import Machine

_BLEND = 0.7

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class Place(NamedTuple):
    """A group of `size` ranks, each `stride` after the one before: the ranks on the inner axes of the mesh lie between."""

    size: int
    stride: int = 1

    def on_a_node(self, machine: Machine) -> int:
        """How many of the ranks share a node."""
        return min(self.size, max(1, machine.ranks_per_node // self.stride))

    def nodes(self, machine: Machine) -> int:
        """Over how many nodes they lie."""
        return -(-self.size // self.on_a_node(machine))


# ---- The dissertation's equations, for one layer with weights [k, n] and activations [m, k] of so many bytes ----


def all_gather_seconds(size: int, sent: float, bandwidth: float) -> float:
    """Equation 5.1: every rank ends with the `sent` bytes of each of `size`."""
    return (size - 1) * sent / bandwidth


def reduce_scatter_seconds(size: int, whole: float, bandwidth: float) -> float:
    """Equation 5.2: every rank begins with `whole` bytes."""
    return (size - 1) / size * whole / bandwidth


def all_reduce_seconds(size: int, whole: float, bandwidth: float) -> float:
    """Equations 5.3 to 5.5: twice that."""
    return 2 * reduce_scatter_seconds(size, whole, bandwidth)


def layer_seconds(
    m: float, k: float, n: float, grid: tuple[int, int, int, int], bandwidth: tuple[float, float, float, float]
) -> float:
    """Equation 5.6: a layer's collectives on a grid (G_x, G_y, G_z, G_data) with the bandwidth of each.

    m x k, k x n and m x n are bytes. Of a transposed layer, x and y are exchanged.
    """
    (x, y, z, data), (beta_x, beta_y, beta_z, beta_data) = grid, bandwidth
    return (
        all_gather_seconds(z, k * n / (x * y * z), beta_z)
        + reduce_scatter_seconds(z, k * n / (x * y), beta_z)
        + all_reduce_seconds(y, m * n / (z * x), beta_y)
        + all_reduce_seconds(x, m * k / (z * y), beta_x)
        + all_reduce_seconds(data, k * n / (x * y * z), beta_data)
    )


def ring_bandwidth(place: Place, machine: Machine) -> float:
    """Of every link of a group's ring while all groups of its kind are at it: case 1 on a node, equation 5.7 across."""
    within = machine.node.groups.get(f"{place.stride}x{place.size}", machine.node.bandwidth)
    if place.stride * place.size <= machine.ranks_per_node:
        return within
    rings = min(machine.ranks_per_node, place.stride)
    used = min(1.0, rings / machine.network.rings)
    return min(machine.node.bandwidth, used * node_bandwidth(place, machine) / rings)


def node_bandwidth(place: Place, machine: Machine) -> float:
    """Of a node towards the others among which the group lies: nodes that are far apart share thinner links."""
    network = machine.network
    spread = place.stride * place.size // machine.ranks_per_node
    if network.group_nodes is None or spread <= network.group_nodes:
        return network.bandwidth
    near = network.group_nodes / spread if place.stride < machine.ranks_per_node else 0.0
    # What leaves the group of nodes goes at the thinner links' rate, the rest at the whole one.
    return network.bandwidth / (near + (1 - near) / network.taper)


# ---- What a collective takes ----


def collective_seconds(kind: Collective, whole: float, place: Place, machine: Machine) -> float:
    """Seconds of a collective among `place` while all other groups of its kind are at it.

    `whole` bytes are what a rank has in the end (all-gather), in the beginning (reduce-scatter, all-to-all) or both
    (all-reduce).
    """
    if place.size == 1 or whole == 0:
        return 0.0
    if kind == "all_to_all":
        moving, latency = _all_to_all(whole, place, machine)
    else:
        twice = 2 if kind == "all_reduce" else 1
        moving = twice * reduce_scatter_seconds(place.size, whole, ring_bandwidth(place, machine))
        latency = twice * _latency(kind, place, machine)
    return _together(moving, latency)


def _together(moving: float, latency: float) -> float:
    """More than both where they are alike: links that are used for a short time do not reach their bandwidth.

    The exponent is the one with which measured all-reduces (nccl-tests on 8 A100, 8 H200, 8 and 32 B200, 256 KiB to 16 GiB)
    come out best: 7 % off on average, and 12 % with the plain sum.
    """
    return float((moving**_BLEND + latency**_BLEND) ** (1 / _BLEND))


def _latency(kind: Collective, place: Place, machine: Machine) -> float:
    """Of the steps: those on a node, then a ring of the nodes; an all-reduce may also go up and down a tree of them."""
    here, nodes = place.on_a_node(machine), place.nodes(machine)
    across = _steps(nodes) if kind == "all_reduce" else nodes - 1
    return _steps(here) * machine.node.latency + across * machine.network.latency


def _steps(ranks: int) -> float:
    """Of a ring, or up and down a tree, if that is shorter."""
    return min(ranks - 1, 2 * math.log2(ranks) + 1)


def _all_to_all(whole: float, place: Place, machine: Machine) -> tuple[float, float]:
    """All ranks of a node send to other ranks at once, those of other nodes through the node's adapters."""
    here, nodes = place.on_a_node(machine), place.nodes(machine)
    inside = whole * (here - 1) / place.size / machine.node.bandwidth
    across = whole * (place.size - here) / place.size * machine.ranks_per_node / node_bandwidth(place, machine)
    return max(inside, across), _steps(here) * machine.node.latency + min(1.0, nodes - 1) * machine.network.latency


def transfer_seconds(sent: float, stride: int, machine: Machine) -> float:
    """Of a message to the rank `stride` further while all ranks send one (a pipeline's next stage)."""
    if stride < machine.ranks_per_node:
        return sent / ring_bandwidth(Place(2, stride), machine) + machine.node.latency
    return sent * machine.ranks_per_node / machine.network.bandwidth + machine.network.latency
