"""A greedy covering array: few cases with every element of many cases."""

from collections.abc import Collection, Hashable, Sequence
from heapq import heapify, heappop, heappush


def covering(cases: Sequence[Collection[Hashable]], costs: Sequence[float] | None = None) -> list[int]:
    """Returns indices of cases that together have all elements of all cases. Each adds the most new elements, per cost
    if `costs` are given.

    Example, every pair of values of options:
        chosen = covering([[*itertools.combinations(sorted(case.items()), 2)] for case in cases])
    """
    bit: dict[Hashable, int] = {}
    meets = [sum({1 << bit.setdefault(element, len(bit)) for element in case}) for case in cases]
    costs = costs or [1.0] * len(cases)
    left, chosen = (1 << len(bit)) - 1, []
    # A case never adds more after others are chosen, so only the first case of the heap is counted anew.
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
