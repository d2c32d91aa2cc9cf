"""Orders nodes that are not equally near, so that neighbours in the order of the ranks have fast links (Pipette; Holmes).

A matrix gives the bandwidth between each two nodes. The order of the nodes decides which links a group's ring uses, as ranks
are on the nodes in order. All groups of a kind wait for the slowest of their links.
"""

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

from optimus.plan.machine import Machine

_ROUNDS = 4  # through all pairs of nodes; the order is seldom improved after the second
_MOST_TRIES = 400  # orders whose step is timed: all pairs of 16 nodes three times
_BEGINNINGS = 32  # first nodes of a chain that are tried


def even(machine: Machine) -> Machine:
    """Returns the machine as if all nodes were as near as the nearest two: no order of its nodes is faster."""
    links = machine.network.links or [[]]
    best = max(
        (value for number, row in enumerate(links) for other, value in enumerate(row) if number != other), default=0
    )
    changes = {"links": None, "group_nodes": None, "taper": 1.0} | ({"bandwidth": best} if best else {})
    return machine.model_copy(update={"network": machine.network.model_copy(update=changes)})


def in_order(machine: Machine, nodes: Sequence[int]) -> Machine:
    """Returns the machine with its nodes in this order."""
    links = machine.network.links
    assert links is not None
    network = machine.network.model_copy(update={"links": [[links[a][b] for b in nodes] for a in nodes]})
    return machine.model_copy(update={"network": network})


def chained(machine: Machine, count: int) -> list[int]:
    """Returns a chain of `count` nodes, from the best first node. Each node is followed by the nearest of the nodes that are
    left."""
    links = machine.network.links
    assert links is not None

    def chain(first: int) -> list[int]:
        order, left = [first], set(range(len(links))) - {first}
        while len(order) < count:
            order.append(max(left, key=lambda node: (sum(links[node][other] for other in order[-4:]), -node)))
            left.remove(order[-1])
        return order

    def worth(order: Sequence[int]) -> float:
        return sum(links[a][b] for a, b in pairwise(order))

    return max(map(chain, range(min(_BEGINNINGS, len(links)))), key=worth)


def exchanged(nodes: Sequence[int], every: int, seconds: Callable[[Sequence[int]], float]) -> list[int]:
    """Returns `nodes` in a better order; the machine has `every` nodes. Pairs change places while that makes a step shorter:
    two nodes in use, or one in use and one that is not."""
    order, tries = [*nodes, *(node for node in range(every) if node not in nodes)], 0
    best = seconds(order[: len(nodes)])
    for _ in range(_ROUNDS):
        before = best
        for a, b in combinations(range(every), 2):
            if a >= len(nodes) or tries >= _MOST_TRIES:
                continue
            tried = list(order)
            tried[a], tried[b] = tried[b], tried[a]
            tries += 1
            if (took := seconds(tried[: len(nodes)])) < best:
                order, best = tried, took
        if best == before:
            break
    return order[: len(nodes)]
