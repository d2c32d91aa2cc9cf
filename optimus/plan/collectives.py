"""Seconds of collectives, by the place of a group's ranks (the dissertation on AxoNN, section 5.1.2).

Equations 5.1 to 5.5 say what a ring moves, case 1 and equation 5.7 how fast its links are. To these are added what the
dissertation leaves out, as it looks at large messages only: the latency of each step, algorithms with fewer steps where that
is cheaper, and a network that is thinner between distant nodes.

What a run of this library would choose among the algorithms of `comm.algorithms` is chosen by the same table, and takes what
was measured of it, or what the events of its messages say.
"""

import math
from functools import lru_cache
from typing import Literal

from optimus.comm import costs
from optimus.comm.algorithms import OWN, CollectiveKind, Curve, pieces, used
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Shape
from optimus.errors import UserError
from optimus.mesh.strided import StridedGroup
from optimus.plan.machine import Machine

_BLEND = 0.7

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
    kind: CollectiveKind, whole: float, place: StridedGroup, machine: Machine, algorithm: Algorithm = "ring"
) -> float:
    """Seconds of a collective among `place` while all other groups of its kind are at it.

    `whole` bytes are what a rank has in the end (all-gather), in the beginning (reduce-scatter, all-to-all) or both
    (all-reduce). `algorithm` says whether a group on several nodes is one ring; the best is the faster of both. Library and
    pccl are for all-gathers and reduce-scatters alone, as is what was measured of them; other kinds are rings. Chosen is
    what a run of this library would choose, or one ring where the time of that is not known.

    Raises `UserError` where the machine does not say what the algorithm needs.
    """
    if place.size == 1 or whole == 0:
        return 0.0
    name = algorithm_named(kind, whole, place, machine, algorithm)
    if algorithm == "chosen" and (known := _chosen_seconds(name, kind, whole, place, machine)) is not None:
        return known
    if name in _BETWEEN_NODES:
        return _BETWEEN_NODES[name](kind, whole, place, machine)
    if kind == "all_to_all":
        return _paced(kind, _all_to_all(whole, place, machine), place, machine)
    once = reduce_scatter_seconds(place.size, whole, ring_bandwidth(place, machine))
    return _paced(kind, 2 * once if kind == "all_reduce" else once, place, machine)


def algorithm_named(
    kind: CollectiveKind, whole: float, place: StridedGroup, machine: Machine, algorithm: Algorithm
) -> str:
    """What `collective_seconds` takes: as it is called in `comm.algorithms`, or among several nodes ring, hierarchical,
    library or pccl."""
    if algorithm == "chosen":
        shape = shape_of(place, machine) if _chooses(machine) else None
        return used(kind, shape, whole, machine.collectives, by_messages=machine.host.shared) if shape else OWN
    here = place.on_a_node(machine.ranks_per_node)
    if here == place.size or kind == "all_to_all" or (kind == "all_reduce" and algorithm in ("library", "pccl")):
        return OWN
    if algorithm in ("hierarchical", "best") and (here == 1 or place.size % here):
        return "ring"
    if algorithm == "best":
        pair: tuple[Algorithm, Algorithm] = ("ring", "hierarchical")
        return min(pair, key=lambda each: collective_seconds(kind, whole, place, machine, each))
    return algorithm


# ---- What a run of this library chooses ----


def _chooses(machine: Machine) -> bool:
    """Whether there is anything but the vendor's library: ranks on processors talk over Gloo, by the schedules of
    `comm.algorithms`; others on two levels where the machine's table has that as faster."""
    return machine.host.shared or machine.collectives is not None


def shape_of(place: StridedGroup, machine: Machine) -> Shape | None:
    """How the ranks lie on nodes; None where some nodes have more of them than others."""
    shape = Shape(place.nodes(machine.ranks_per_node), place.on_a_node(machine.ranks_per_node))
    return shape if shape.ranks == place.size else None


def _chosen_seconds(
    name: str, kind: CollectiveKind, whole: float, place: StridedGroup, machine: Machine
) -> float | None:
    """Seconds of that algorithm: as it was measured, or over Gloo between nodes by events; None where neither is known."""
    shape = shape_of(place, machine) if _chooses(machine) else None
    if shape is None:
        return None
    curves = machine.collectives.curves(kind, shape) if machine.collectives else {}
    if name in curves:
        return curves[name].at(whole)
    if not machine.host.shared or shape.nodes == 1:
        return None
    links = links_of(machine, place.groups_on_a_node(machine.ranks_per_node), node_bandwidth(place, machine))
    # Between the two nearest powers of two, as a search asks for many sizes.
    low = 2.0 ** math.floor(math.log2(max(whole, 1.0)))
    sizes = [low] if whole == low else [low, 2 * low]
    return Curve(sizes=sizes, seconds=[_by_events(name, kind, shape, size, links) for size in sizes]).at(whole)


@lru_cache(maxsize=4096)
def _by_events(name: str, kind: CollectiveKind, shape: Shape, size: float, links: Links) -> float:
    return costs.seconds(name, kind, shape, size, links, pieces(name, shape, size))


def links_of(machine: Machine, groups: int, bandwidth: float) -> Links:
    """Links of a group while so many of its kind are at it on each node; `bandwidth` is that of a node between nodes."""
    network, node = machine.network, machine.node
    adapters = max(1, network.rings // groups)
    each = bandwidth / groups / adapters
    return Links(between=Link(network.latency, each), inside=Link(node.latency, node.bandwidth), adapters=adapters)


# ---- Algorithms between nodes ----


def hierarchical_seconds(kind: CollectiveKind, whole: float, place: StridedGroup, machine: Machine) -> float:
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


def library_seconds(kind: CollectiveKind, whole: float, place: StridedGroup, machine: Machine) -> float:
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


def pccl_seconds(kind: CollectiveKind, whole: float, place: StridedGroup, machine: Machine) -> float:
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


_BETWEEN_NODES = {"hierarchical": hierarchical_seconds, "library": library_seconds, "pccl": pccl_seconds}


# ---- What remains of small messages ----


def _paced(kind: CollectiveKind, moving: float, place: StridedGroup, machine: Machine) -> float:
    """More than both moving and latency where they are alike: links that are used for a short time do not reach their
    bandwidth.

    The exponent is the one with which measured all-reduces (nccl-tests on 8 A100, 8 H200, 8 and 32 B200, 256 KiB to 16 GiB)
    come out best: 7 % off on average, and 12 % with the plain sum.
    """
    moving, latency = moving / machine.node.pace(kind).share, _latency(kind, place, machine)
    return float((moving**_BLEND + latency**_BLEND) ** (1 / _BLEND))


def _latency(kind: CollectiveKind, place: StridedGroup, machine: Machine) -> float:
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
