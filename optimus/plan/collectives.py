"""Seconds of collectives, by the place of a group's ranks (the dissertation on AxoNN, section 5.1.2).

Equations 5.1 to 5.5 say what a ring moves, case 1 and equation 5.7 how fast its links are. To these are added what the
dissertation leaves out, as it looks at large messages only: the latency of each step, algorithms with fewer steps where that
is cheaper, and a network that is thinner between distant nodes.
"""

import math
from functools import lru_cache
from typing import Literal

from optimus.comm.algorithms import OWN
from optimus.comm.schedules import Shape
from optimus.errors import UserError
from optimus.mesh.strided import StridedGroup
from optimus.plan.choices import algorithm_of, chosen_seconds
from optimus.plan.machine import Machine

_BLEND = 0.7

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Algorithm = Literal["ring", "hierarchical", "best", "library", "pccl", "chosen"]


# ---- How fast links are ----


def ring_bandwidth(place: StridedGroup, machine: Machine) -> float:
    """Of every link of a group's ring while all groups of its kind are at it: case 1 on a node, equation 5.7 across."""
    if place.nodes(machine.ranks_per_node) == 1:
        return machine.node.groups.get(f"{place.stride}x{place.size}", machine.node.bandwidth)
    rings = place.groups_on_a_node(machine.ranks_per_node)
    used = min(1.0, rings / machine.network.rings)
    return min(machine.node.bandwidth, used * node_bandwidth(place, machine) / rings)


def node_bandwidth(place: StridedGroup, machine: Machine) -> float:
    """Of a node towards the others among which the group lies: nodes that are far apart share thinner links."""
    network = machine.network
    if network.links is not None:
        return thinnest(place, machine)
    spread = place.span // machine.ranks_per_node
    if network.group_nodes is None or spread <= network.group_nodes:
        return network.bandwidth
    near = network.group_nodes / spread if place.stride < machine.ranks_per_node else 0.0
    # What leaves the group of nodes goes at the thinner links' rate, the rest at the whole one.
    return network.bandwidth / (near + (1 - near) / network.taper)


def thinnest(place: StridedGroup, machine: Machine) -> float:
    """Of the links that rings of this kind use, where nodes are not equally near and stand in the order of the ranks."""
    links = machine.network.links or []
    return min((links[a][b] for a, b in _neighbours(place, machine.ranks_per_node, len(links))), default=math.inf)


@lru_cache(maxsize=1024)
def _neighbours(place: StridedGroup, ranks: int, nodes: int) -> frozenset[tuple[int, int]]:
    """Nodes that follow each other on a ring of any group of this kind, with `ranks` on each of `nodes`."""
    near = place.near or place.size
    one = [i % near * place.stride + i // near * place.far for i in range(place.size)]
    blocks = range(0, place.far, near * place.stride) if place.near else range(1)
    beside = [block + inner for block in blocks for inner in range(place.stride)]
    found = set()
    for first in range(0, nodes * ranks - place.span + 1, place.span):
        for begin in beside:
            on = [(first + begin + rank) // ranks for rank in one]
            found |= {(a, b) for a, b in zip(on, [*on[1:], on[0]]) if a != b}
    return frozenset(found)


# ---- What a collective takes ----


def reduce_scatter_seconds(size: int, whole: float, bandwidth: float) -> float:
    """Equation 5.2: every one of `size` ranks begins with `whole` bytes. An all-gather to so many takes as long (5.1), an
    all-reduce twice that (5.3 to 5.5)."""
    return (size - 1) / size * whole / bandwidth


def collective_seconds(
    kind: Collective, whole: float, place: StridedGroup, machine: Machine, algorithm: Algorithm = "ring"
) -> float:
    """Seconds of a collective among `place` while all other groups of its kind are at it.

    `whole` bytes are what a rank has in the end (all-gather), in the beginning (reduce-scatter, all-to-all) or both
    (all-reduce). `algorithm` says whether a group on several nodes is one ring; the best is the faster of both. Library and
    pccl are for all-gathers and reduce-scatters alone, as is what was measured of them; other kinds are rings. Chosen is
    what a run of this library would choose (`choices`), or one ring where the time of that is not known.

    Raises `UserError` where the machine does not say what the algorithm needs.
    """
    if place.size == 1 or whole == 0:
        return 0.0
    if algorithm == "chosen":
        known = _chosen_seconds(kind, whole, place, machine)
        if known is not None:
            return known
        algorithm = "ring"
    if kind == "all_to_all":
        return _paced(kind, _all_to_all(whole, place, machine), place, machine)
    here = place.on_a_node(machine.ranks_per_node)
    if algorithm in ("library", "pccl"):
        if kind != "all_reduce" and place.nodes(machine.ranks_per_node) > 1:
            return (library_seconds if algorithm == "library" else pccl_seconds)(kind, whole, place, machine)
        algorithm = "ring"
    if algorithm != "ring" and 1 < here < place.size and place.size % here == 0:
        several = hierarchical_seconds(kind, whole, place, machine)
        return several if algorithm == "hierarchical" else min(several, collective_seconds(kind, whole, place, machine))
    once = reduce_scatter_seconds(place.size, whole, ring_bandwidth(place, machine))
    return _paced(kind, 2 * once if kind == "all_reduce" else once, place, machine)


def shape_of(place: StridedGroup, machine: Machine) -> Shape | None:
    """How the ranks lie on nodes; None where some nodes have more of them than others."""
    shape = Shape(place.nodes(machine.ranks_per_node), place.on_a_node(machine.ranks_per_node))
    return shape if shape.ranks == place.size else None


def _chosen_seconds(kind: Collective, whole: float, place: StridedGroup, machine: Machine) -> float | None:
    if machine.collectives is None and not machine.host.shared:
        return None
    shape = shape_of(place, machine)
    if shape is None:
        return None
    return chosen_seconds(
        kind, whole, shape, machine, place.groups_on_a_node(machine.ranks_per_node), node_bandwidth(place, machine)
    )


def algorithm_named(kind: Collective, whole: float, place: StridedGroup, machine: Machine, algorithm: Algorithm) -> str:
    """What `collective_seconds` takes, as it is called in `comm.algorithms`, or in words."""
    shape, levels = shape_of(place, machine), place.nodes(machine.ranks_per_node) > 1
    if algorithm == "chosen":
        return algorithm_of(kind, whole, shape, machine) if shape else OWN
    if not levels or kind == "all_to_all" or (kind == "all_reduce" and algorithm in ("library", "pccl")):
        return OWN
    if algorithm == "best":
        pair: tuple[Algorithm, Algorithm] = ("ring", "hierarchical")
        return min(pair, key=lambda each: collective_seconds(kind, whole, place, machine, each))
    return algorithm


def hierarchical_seconds(kind: Collective, whole: float, place: StridedGroup, machine: Machine) -> float:
    """In two levels: the ranks of a node each send a part to other nodes, all at once, and share what comes (the
    dissertation's chapter on PCCL; an all-reduce is a reduce-scatter on the node, an all-reduce of its parts between nodes
    and an all-gather on the node)."""
    here = place.on_a_node(machine.ranks_per_node)
    inside, across = place.inner(here), place.outer(here)
    if kind == "all_reduce":
        on_node = sum(collective_seconds(each, whole, inside, machine) for each in ("reduce_scatter", "all_gather"))
    else:
        on_node = collective_seconds(kind, whole, inside, machine)
    return on_node + collective_seconds(kind, whole / here, across, machine)


def library_seconds(kind: Collective, whole: float, place: StridedGroup, machine: Machine) -> float:
    """Of an all-gather or reduce-scatter as the ring of the vendor's library does it, over all ranks on several nodes.

    Each of its size - 1 steps takes the root of the sum of the squares of its latency and of a block's time on the links.
    Raises `UserError` where the machine does not say how long these are.
    """
    library = machine.network.library
    if library is None:
        raise UserError(
            f"machine {machine.name} does not say how fast its vendor's collectives are between nodes: "
            "profile.collectives=library needs network.library"
        )
    block, rings = whole / place.size, place.groups_on_a_node(machine.ranks_per_node)
    steps = (
        math.hypot(each.step, block * rings / each.bandwidth)
        for each in library.on(place.nodes(machine.ranks_per_node))
    )
    return (place.size - 1) * min(steps)


def pccl_seconds(kind: Collective, whole: float, place: StridedGroup, machine: Machine) -> float:
    """Of an all-gather or reduce-scatter as PCCL does it (dissertation on AxoNN, section 6.2): recursive doubling between
    nodes, then a ring on the node, and a copy that puts all blocks in order; a reduce-scatter the other way.

    Raises `UserError` where the machine does not say how long its rounds take.
    """
    doubling, here = machine.network.doubling, place.on_a_node(machine.ranks_per_node)
    if doubling is None:
        raise UserError(
            f"machine {machine.name} does not say how long rounds between nodes take: profile.collectives=pccl needs "
            "network.doubling"
        )
    nodes, across = place.nodes(machine.ranks_per_node), place.outer(here)
    sent = (nodes - 1) / nodes * whole / here
    between = (
        math.ceil(math.log2(nodes)) * doubling.step
        + sent * across.groups_on_a_node(machine.ranks_per_node) / doubling.bandwidth
    )
    ordered = machine.memory_seconds(2 * whole) if here > 1 else 0.0
    return between + collective_seconds(kind, whole, place.inner(here), machine) + ordered


def _paced(kind: Collective, moving: float, place: StridedGroup, machine: Machine) -> float:
    """More than both moving and latency where they are alike: links that are used for a short time do not reach their
    bandwidth.

    The exponent is the one with which measured all-reduces (nccl-tests on 8 A100, 8 H200, 8 and 32 B200, 256 KiB to 16 GiB)
    come out best: 7 % off on average, and 12 % with the plain sum.
    """
    moving, latency = moving / machine.node.pace(kind).share, _latency(kind, place, machine)
    return float((moving**_BLEND + latency**_BLEND) ** (1 / _BLEND))


def _latency(kind: Collective, place: StridedGroup, machine: Machine) -> float:
    """Of the steps: those on a node, then a ring of the nodes; an all-reduce may also go up and down a tree of them, and
    goes both ways; what all ranks exchange with all others goes at once."""
    here, nodes, pace = (
        place.on_a_node(machine.ranks_per_node),
        place.nodes(machine.ranks_per_node),
        machine.node.pace(kind),
    )
    across = {"all_reduce": _steps(nodes), "all_to_all": min(1.0, nodes - 1)}.get(kind, nodes - 1)
    both = _steps(here) * pace.step + across * machine.network.latency
    return pace.start + (2 * both if kind == "all_reduce" else both)


def _steps(ranks: int) -> float:
    """Of a ring, or up and down a tree, if that is shorter."""
    return min(ranks - 1, 2 * math.log2(ranks) + 1)


def _all_to_all(whole: float, place: StridedGroup, machine: Machine) -> float:
    """All ranks of a node send to other ranks at once, those of other nodes through the node's adapters."""
    here = place.on_a_node(machine.ranks_per_node)
    inside = whole * (here - 1) / place.size / machine.node.bandwidth
    across = whole * (place.size - here) / place.size * machine.ranks_per_node / node_bandwidth(place, machine)
    return max(inside, across)


def transfer_seconds(sent: float, place: StridedGroup, machine: Machine) -> float:
    """Of a message to the next rank of `place` while all ranks send one (a pipeline's next stage): of those that leave the
    node, if there are such, as they take longest."""
    pace = machine.node.pace("shift")
    bandwidth = machine.node.groups.get(f"{place.stride}x2", machine.node.bandwidth)
    inside = sent / bandwidth / pace.share + pace.start + pace.step
    if place.nodes(machine.ranks_per_node) == 1:
        return inside
    bandwidth = machine.network.bandwidth if machine.network.links is None else thinnest(place, machine)
    leaving = min(machine.ranks_per_node, place.stride)
    across = sent * leaving / bandwidth + machine.network.latency
    return max(inside, across) if place.on_a_node(machine.ranks_per_node) > 1 else across
