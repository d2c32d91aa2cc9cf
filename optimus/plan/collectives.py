"""Predicts the seconds of collectives, by the placement of a group's ranks (the dissertation on AxoNN, section 5.1.2).

Equations 5.1 to 5.5 give the seconds of a ring; case 1 and equation 5.7 give the bandwidth of the ring's links.
"""

import math
from functools import lru_cache
from typing import Literal

from optimus.comm.algorithms import OWN, CollectiveKind, Curve, pieces, used
from optimus.comm.costs import seconds as simulated_seconds
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Shape
from optimus.errors import UserError
from optimus.mesh.strided import StridedGroup
from optimus.plan.machine import Machine

_BLEND = 0.7

Algorithm = Literal["ring", "hierarchical", "best", "library", "pccl", "chosen"]


# ---- Bandwidth of links ----


def ring_bandwidth(group: StridedGroup, machine: Machine) -> float:
    """Returns the bandwidth of a group's ring while all groups with the same size and strides communicate.

    The bandwidth follows case 1 on a node, and equation 5.7 across nodes.
    """
    if group.nodes(machine.ranks_per_node) == 1:
        # `Node.groups` has no measurements of groups with two strides.
        measured = {} if group.near else machine.node.groups
        return measured.get(f"{group.stride}x{group.size}", machine.node.bandwidth)
    rings = group.groups_on_a_node(machine.ranks_per_node)
    used = min(1.0, rings / machine.network.rings)
    return min(machine.node.bandwidth, used * node_bandwidth(group, machine) / rings)


def node_bandwidth(group: StridedGroup, machine: Machine) -> float:
    """Returns the bandwidth of a node to the other nodes of a group."""
    network = machine.network
    if network.links is not None:
        return thinnest(group, machine)
    spread = group.span // machine.ranks_per_node
    if network.group_nodes is None or spread <= network.group_nodes:
        return network.bandwidth
    near = network.group_nodes / spread if group.stride < machine.ranks_per_node else 0.0
    # Traffic that leaves the neighbouring nodes has the tapered bandwidth.
    return network.bandwidth / (near + (1 - near) / network.taper)


def thinnest(group: StridedGroup, machine: Machine) -> float:
    """Returns the lowest bandwidth in `network.links` along the rings of all groups with this size and these strides.

    Returns infinity if the rings connect no two nodes.
    """
    links = machine.network.links or []
    return min((links[a][b] for a, b in _neighbours(group, machine.ranks_per_node, len(links))), default=math.inf)


@lru_cache(maxsize=1024)
def _neighbours(group: StridedGroup, ranks: int, nodes: int) -> frozenset[tuple[int, int]]:
    near = group.near or group.size
    one = [i % near * group.stride + i // near * group.far for i in range(group.size)]
    blocks = range(0, group.far, near * group.stride) if group.near else range(1)
    beside = [block + inner for block in blocks for inner in range(group.stride)]
    found = set()
    # A group whose two strides are an approximation may reach beyond the last node.
    for first in range(0, max(1, nodes * ranks - group.span + 1), group.span):
        for begin in beside:
            on = [node for rank in one if (node := (first + begin + rank) // ranks) < nodes]
            found |= {(a, b) for a, b in zip(on, [*on[1:], *on[:1]]) if a != b}
    return frozenset(found)


# ---- Seconds of a collective ----


def reduce_scatter_seconds(size: int, nbytes: float, bandwidth: float) -> float:
    """Returns the seconds of a reduce-scatter over `size` ranks, with `nbytes` bytes on each rank (equation 5.2).

    An all-gather takes as long (equation 5.1), and an all-reduce takes twice as long (equations 5.3 to 5.5).
    """
    return (size - 1) / size * nbytes / bandwidth


def collective_seconds(
    kind: CollectiveKind,
    nbytes: float,
    group: StridedGroup,
    machine: Machine,
    algorithm: Algorithm = "ring",
    *,
    narrow: bool = False,
) -> float:
    """Returns the seconds of a collective while all groups with the same size and strides communicate.

    `nbytes` is the number of bytes that a rank has at the end (all-gather, all-reduce) or at the beginning
    (reduce-scatter, all-to-all). `narrow` is true for floats of fewer than 32 bits. All-to-alls and groups on
    one node use the built-in collective unless `algorithm` is `chosen`. All-reduces use the built-in collective with
    `library` and `pccl`. The values of `algorithm` are:

    - ring: one ring over all ranks;
    - hierarchical: two levels, within nodes and between nodes; a ring if the nodes have one rank of the group each, or
      unequal numbers of the group's ranks;
    - best: the faster of ring and hierarchical;
    - library, pccl: the vendor's library or PCCL, by measured figures, for all-gathers and reduce-scatters;
    - chosen: the algorithm that a run of this library chooses.
    """
    if group.size == 1 or nbytes == 0:
        return 0.0
    name = algorithm_named(kind, nbytes, group, machine, algorithm, narrow=narrow)
    if algorithm == "chosen" and (known := _chosen_seconds(name, kind, nbytes, group, machine)) is not None:
        return known
    if name in _BETWEEN_NODES:
        return _BETWEEN_NODES[name](kind, nbytes, group, machine)
    if kind == "all_to_all":
        return _paced(kind, _all_to_all(nbytes, group, machine), group, machine)
    once = reduce_scatter_seconds(group.size, nbytes, ring_bandwidth(group, machine))
    return _paced(kind, 2 * once if kind == "all_reduce" else once, group, machine)


def algorithm_named(
    kind: CollectiveKind,
    nbytes: float,
    group: StridedGroup,
    machine: Machine,
    algorithm: Algorithm,
    *,
    narrow: bool = False,
) -> str:
    """Returns the name of the algorithm that `collective_seconds` assumes."""
    if algorithm == "chosen":
        shape = shape_of(group, machine) if _chooses(machine) else None
        if shape is None:
            return OWN
        return used(kind, shape, nbytes, machine.collectives, by_messages=machine.host.shared, narrow=narrow)
    here = group.on_a_node(machine.ranks_per_node)
    if here == group.size or kind == "all_to_all" or (kind == "all_reduce" and algorithm in ("library", "pccl")):
        return OWN
    if algorithm in ("hierarchical", "best") and (here == 1 or group.size % here):
        return "ring"
    if algorithm == "best":
        pair: tuple[Algorithm, Algorithm] = ("ring", "hierarchical")
        return min(pair, key=lambda each: collective_seconds(kind, nbytes, group, machine, each))
    return algorithm


# ---- Algorithms that a run chooses ----


def _chooses(machine: Machine) -> bool:
    return machine.host.shared or machine.collectives is not None


def shape_of(group: StridedGroup, machine: Machine) -> Shape | None:
    """Returns the shape of a group on its nodes, or None if the nodes have unequal numbers of the group's ranks."""
    shape = Shape(group.nodes(machine.ranks_per_node), group.on_a_node(machine.ranks_per_node))
    return shape if shape.ranks == group.size else None


def _chosen_seconds(
    name: str, kind: CollectiveKind, nbytes: float, group: StridedGroup, machine: Machine
) -> float | None:
    """Returns the measured or simulated seconds of algorithm `name`, or None without measurement and simulation."""
    shape = shape_of(group, machine) if _chooses(machine) else None
    if shape is None:
        return None
    curves = machine.collectives.curves(kind, shape) if machine.collectives else {}
    if name in curves:
        return curves[name].at(nbytes)
    if not machine.host.shared or shape.nodes == 1:
        return None
    links = links_of(machine, group.groups_on_a_node(machine.ranks_per_node), node_bandwidth(group, machine))
    # Interpolation between two powers of two saves simulations.
    low = 2.0 ** math.floor(math.log2(max(nbytes, 1.0)))
    sizes = [low] if nbytes == low else [low, 2 * low]
    return Curve(sizes=sizes, seconds=[_by_events(name, kind, shape, size, links) for size in sizes]).at(nbytes)


@lru_cache(maxsize=4096)
def _by_events(name: str, kind: CollectiveKind, shape: Shape, size: float, links: Links) -> float:
    return simulated_seconds(name, kind, shape, size, links, pieces(name, shape, size))


def links_of(machine: Machine, groups: int, bandwidth: float) -> Links:
    """Returns the links of a group while `groups` groups share a node's `bandwidth` to other nodes."""
    network, node = machine.network, machine.node
    adapters = max(1, network.rings // groups)
    each = bandwidth / groups / adapters
    return Links(between=Link(network.latency, each), inside=Link(node.latency, node.bandwidth), adapters=adapters)


# ---- Algorithms between nodes ----


def hierarchical_seconds(kind: CollectiveKind, nbytes: float, group: StridedGroup, machine: Machine) -> float:
    """Returns the seconds of a collective in two levels (the dissertation's chapter on PCCL)."""
    here = group.on_a_node(machine.ranks_per_node)
    inside, across = group.inner(here), group.outer(here)
    if kind == "all_reduce":
        on_node = sum(collective_seconds(each, nbytes, inside, machine) for each in ("reduce_scatter", "all_gather"))
    else:
        on_node = collective_seconds(kind, nbytes, inside, machine)
    return on_node + collective_seconds(kind, nbytes / here, across, machine)


def library_seconds(kind: CollectiveKind, nbytes: float, group: StridedGroup, machine: Machine) -> float:
    """Returns the seconds of an all-gather or reduce-scatter by the ring of the vendor's library.

    The time of a step is the square root of (latency squared + transfer time squared). Raises `UserError` when the
    machine lacks `network.library`.
    """
    library = machine.network.library
    if library is None:
        raise UserError(
            f"profile.collectives=library: machine {machine.name} has no network.library, the measured speed of the "
            "vendor's collectives between nodes: add it to the machine's file or choose other collectives"
        )
    block, rings = nbytes / group.size, group.groups_on_a_node(machine.ranks_per_node)
    steps = (
        math.hypot(each.step, block * rings / each.bandwidth)
        for each in library.on(group.nodes(machine.ranks_per_node))
    )
    return (group.size - 1) * min(steps)


def pccl_seconds(kind: CollectiveKind, nbytes: float, group: StridedGroup, machine: Machine) -> float:
    """Returns the seconds of an all-gather or reduce-scatter by PCCL (dissertation on AxoNN, section 6.2).

    An all-gather is recursive doubling between nodes, then a ring on the node. Raises `UserError` when the machine
    lacks `network.doubling`.
    """
    doubling, here = machine.network.doubling, group.on_a_node(machine.ranks_per_node)
    if doubling is None:
        raise UserError(
            f"profile.collectives=pccl: machine {machine.name} has no network.doubling, the measured time of rounds between "
            "nodes: add it to the machine's file or choose other collectives"
        )
    nodes, across = group.nodes(machine.ranks_per_node), group.outer(here)
    sent = (nodes - 1) / nodes * nbytes / here
    between = (
        math.ceil(math.log2(nodes)) * doubling.step
        + sent * across.groups_on_a_node(machine.ranks_per_node) / doubling.bandwidth
    )
    ordered = machine.memory_seconds(2 * nbytes) if here > 1 else 0.0
    return between + collective_seconds(kind, nbytes, group.inner(here), machine) + ordered


_BETWEEN_NODES = {"hierarchical": hierarchical_seconds, "library": library_seconds, "pccl": pccl_seconds}


# ---- Latency, all-to-alls, and messages to the next rank ----


def _paced(kind: CollectiveKind, moving: float, group: StridedGroup, machine: Machine) -> float:
    """Combines transfer time and latency.

    The exponent `_BLEND` fits measured all-reduces (nccl-tests on 8 A100, 8 H200, 8 and 32 B200, 256 KiB to 16 GiB)
    with a mean error of 7 %.
    """
    moving, latency = moving / machine.node.pace(kind).share, _latency(kind, group, machine)
    return float((moving**_BLEND + latency**_BLEND) ** (1 / _BLEND))


def _latency(kind: CollectiveKind, group: StridedGroup, machine: Machine) -> float:
    here, nodes, pace = (
        group.on_a_node(machine.ranks_per_node),
        group.nodes(machine.ranks_per_node),
        machine.node.pace(kind),
    )
    across = {"all_reduce": _steps(nodes), "all_to_all": min(1.0, nodes - 1)}.get(kind, nodes - 1)
    both = _steps(here) * pace.step + across * machine.network.latency
    return pace.start + (2 * both if kind == "all_reduce" else both)


def _steps(ranks: int) -> float:
    """Returns the number of steps of a ring or of a tree, whichever is smaller."""
    return min(ranks - 1, 2 * math.log2(ranks) + 1)


def _all_to_all(nbytes: float, group: StridedGroup, machine: Machine) -> float:
    here = group.on_a_node(machine.ranks_per_node)
    inside = nbytes * (here - 1) / group.size / machine.node.bandwidth
    across = nbytes * (group.size - here) / group.size * machine.ranks_per_node / node_bandwidth(group, machine)
    return max(inside, across)


def transfer_seconds(sent: float, group: StridedGroup, machine: Machine) -> float:
    """Returns the seconds of a message of `sent` bytes to the next rank of `group` while all ranks send."""
    pace = machine.node.pace("shift")
    bandwidth = machine.node.groups.get(f"{group.stride}x2", machine.node.bandwidth)
    inside = sent / bandwidth / pace.share + pace.start + pace.step
    if group.nodes(machine.ranks_per_node) == 1:
        return inside
    senders = min(machine.ranks_per_node, group.stride)
    across = sent * senders / node_bandwidth(group, machine) + machine.network.latency
    return max(inside, across) if group.on_a_node(machine.ranks_per_node) > 1 else across
