"""Few cases that meet all that many meet: a covering array, chosen greedily."""

from collections.abc import Collection, Hashable, Sequence
from heapq import heapify, heappop, heappush


def covering(cases: Sequence[Collection[Hashable]], costs: Sequence[float] | None = None) -> list[int]:
    """Indices of cases whose elements together are those of all cases; each the one that adds most to those before it, for
    what it costs where `costs` are given.

    Example, every pair of values of options:
        chosen = covering([[*itertools.combinations(sorted(case.items()), 2)] for case in cases])
    """
    bit: dict[Hashable, int] = {}
    meets = [sum({1 << bit.setdefault(element, len(bit)) for element in case}) for case in cases]
    costs = costs or [1.0] * len(cases)
    left, chosen = (1 << len(bit)) - 1, []
    # What a case adds gets less as others are chosen, never more: only the first of the heap is counted again.
    heap = [(-case.bit_count() / cost, index) for index, (case, cost) in enumerate(zip(meets, costs, strict=True))]
    heapify(heap)
    while left:
        _, index = heappop(heap)
        adds = -(meets[index] & left).bit_count() / costs[index]
        if heap and adds > heap[0][0]:
            heappush(heap, (adds, index))
        else:
            chosen.append(index)
            left &= ~meets[index]
    return chosen
