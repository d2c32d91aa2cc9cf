"""Orders nodes with unequal links so that consecutive nodes have fast links (Pipette; Holmes)."""

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

from optimus.plan.machine import Machine

_ROUNDS = 4  # maximum number of rounds over all pairs of nodes
_MOST_TRIES = 400  # maximum number of swaps that `exchanged` tries
_BEGINNINGS = 32  # maximum number of first nodes that `chained` tries


def even(machine: Machine) -> Machine:
    """Returns the machine without taper. All pairs of nodes have the bandwidth of the fastest pair.

    The machine keeps `network.bandwidth` if `network.links` has no pair of nodes.
    """
    links = machine.network.links or [[]]
    best = max(
        (value for number, row in enumerate(links) for other, value in enumerate(row) if number != other), default=0
    )
    changes = {"links": None, "group_nodes": None, "taper": 1.0} | ({"bandwidth": best} if best else {})
    return machine.model_copy(update={"network": machine.network.model_copy(update=changes)})


def in_order(machine: Machine, nodes: Sequence[int]) -> Machine:
    """Returns the machine with the links of `nodes`, in the order of `nodes`. The machine must have `network.links`."""
    links = machine.network.links
    assert links is not None
    network = machine.network.model_copy(update={"links": [[links[a][b] for b in nodes] for a in nodes]})
    return machine.model_copy(update={"network": network})


def chained(machine: Machine, count: int) -> list[int]:
    """Returns the chain of `count` nodes with the highest total bandwidth between neighbours, among greedy chains.

    One greedy chain starts at each of the machine's first `_BEGINNINGS` nodes. Each next node is the remaining node
    with the highest total bandwidth to the last four nodes of the chain. The machine must have `network.links`.
    """
    links = machine.network.links
    assert links is not None

    def chain(first: int) -> list[int]:
        order, remaining = [first], set(range(len(links))) - {first}
        while len(order) < count:
            order.append(max(remaining, key=lambda node: (sum(links[node][other] for other in order[-4:]), -node)))
            remaining.remove(order[-1])
        return order

    def worth(order: Sequence[int]) -> float:
        return sum(links[a][b] for a, b in pairwise(order))

    return max(map(chain, range(min(_BEGINNINGS, len(links)))), key=worth)


def exchanged(nodes: Sequence[int], every: int, seconds: Callable[[Sequence[int]], float]) -> list[int]:
    """Searches for faster nodes than `nodes` by pairwise swaps, on a machine with `every` nodes.

    Returns `len(nodes)` nodes in an order that is at least as fast as `nodes`.

    `seconds` predicts the seconds of a step with the nodes in a given order.
    """
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
