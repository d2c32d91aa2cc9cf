"""The least activation recomputation that fits into a number of bytes.

The candidates are no recomputation, sets of modules in every n-th block, and segments of n whole blocks, as far as the
model supports these. Among candidates of equal cost, prefers n nearest to the square root of the number of blocks
(AxoNN dissertation, section 3.3.1, equation 3.1).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, combinations
from math import sqrt

from optimus.config import Architecture
from optimus.errors import UserError
from optimus.model.count import forward_flops
from optimus.parallel.activations import Activations
from optimus.parallel.recompute import Recomputation

_MARGIN = 1.01  # factor on the peak, for small tensors
BUSY = 1.5  # assumed load imbalance (max/mean) of the experts


def choose_recomputation(
    config: Architecture, budget: int, context: int, sizes: Callable[[Recomputation], Activations]
) -> tuple[Recomputation, Activations]:
    """Returns (the cheapest recomputation whose peak fits into `budget` bytes, its activations). Raises `UserError` if
    nothing fits."""

    def order(chosen: Recomputation) -> tuple[float, float]:
        return recomputed_flops(config, chosen, context), abs(chosen.every - sqrt(config.layers))

    found = dict[Recomputation, Activations]()
    for chosen in sorted(_candidates(config, context), key=order):
        found[chosen] = sizes(chosen)
        if found[chosen].peak * _MARGIN <= budget:
            return chosen, found[chosen]
    least = min(found, key=lambda chosen: found[chosen].peak)
    needed = int(found[least].peak * _MARGIN) + 1
    raise UserError(
        f"recompute_budget {budget:,} bytes: activations take at least {needed:,} bytes, with {least}: raise the budget, or "
        "lower train.micro_batch or train.sequence_length"
    )


def recomputed_flops(config: Architecture, chosen: Recomputation, context: int) -> float:
    """Estimates the recomputed floating-point operations per token."""
    cost = {"norm": 20.0 * config.hidden, **forward_flops(config, context)}
    numbers = Counter[tuple[str, ...]]()
    for layers, kinds in chosen.segments(range(config.layers)):
        numbers[kinds] += len(layers)
    return sum(
        number * sum(cost[kind] for kind in (cost if "block" in kinds else kinds)) for kinds, number in numbers.items()
    )


def _candidates(config: Architecture, context: int) -> Iterator[Recomputation]:
    costed = [kind for kind in forward_flops(config, context) if kind != "block"]  # "block" has its own candidates
    modules = [] if "modules" in config.limits else ["norm", *(kind for kind in costed if kind not in config.limits)]
    sets = chain.from_iterable(combinations(modules, count) for count in range(1, len(modules) + 1))
    yield Recomputation()
    for kinds in (*sets, ("block",)):
        segments = kinds != ("block",) or "segments" not in config.limits
        for every in range(1, config.layers + 1 if segments else 2):
            yield Recomputation(kinds, every)
