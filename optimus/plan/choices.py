"""Which algorithm a run of this library uses for a collective, and what it then takes: by the table by which it chooses."""

import math
from functools import lru_cache

from optimus.comm import costs
from optimus.comm.algorithms import CollectiveKind, Curve, pieces, used
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Shape
from optimus.plan.machine import Machine


def links_of(machine: Machine, groups: int, bandwidth: float) -> Links:
    """Links of a group while so many of its kind are at it on each node; `bandwidth` is that of a node between nodes."""
    network, node = machine.network, machine.node
    adapters = max(1, network.rings // groups)
    each = bandwidth / groups / adapters
    return Links(between=Link(network.latency, each), inside=Link(node.latency, node.bandwidth), adapters=adapters)


def algorithm_of(kind: CollectiveKind, whole: float, shape: Shape, machine: Machine) -> str:
    """The algorithm of a collective of `whole` bytes, as `comm.Group` chooses it.

    Ranks on processors talk over Gloo, by the schedules of `comm.algorithms`; others over their vendor's library, on two
    levels where the machine's table has that as faster.
    """
    return used(kind, shape, whole, machine.collectives, by_messages=machine.host.shared)


def chosen_seconds(
    kind: CollectiveKind, whole: float, shape: Shape, machine: Machine, groups: int, bandwidth: float
) -> float | None:
    """Seconds by the algorithm that is chosen: as it was measured, or over Gloo between nodes by events; None where neither
    is known. See `links_of` for the last two."""
    curves = machine.collectives.curves(kind, shape) if machine.collectives else {}
    name = algorithm_of(kind, whole, shape, machine)
    if name in curves:
        return curves[name].at(whole)
    if machine.host.shared and shape.nodes > 1:
        return _by_events(name, kind, shape, whole, links_of(machine, groups, bandwidth))
    return None


def _by_events(name: str, kind: CollectiveKind, shape: Shape, whole: float, links: Links) -> float:
    """Between the two nearest powers of two, as a search asks for many sizes."""
    low = 2.0 ** math.floor(math.log2(max(whole, 1.0)))
    sizes = [low] if whole == low else [low, 2 * low]
    return Curve(sizes=sizes, seconds=[_events(name, kind, shape, size, links) for size in sizes]).at(whole)


@lru_cache(maxsize=4096)
def _events(name: str, kind: CollectiveKind, shape: Shape, size: float, links: Links) -> float:
    return costs.seconds(name, kind, shape, size, links, pieces(name, shape, size))
