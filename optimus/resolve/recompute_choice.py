"""The least recomputation whose activations fit into a number of bytes.

Candidates are all sets of modules, of every n-th block for every n, and segments of n whole blocks. The dissertation on
AxoNN (section 3.3.1, equation 3.1) takes n near the root of the number of blocks N: N / n inputs are kept, and n blocks are
there at a time. That is least if a block keeps no more than its input, but it keeps many times that. So here bytes are
computed, and the root decides between candidates that recompute equally much.
"""

from collections.abc import Callable, Iterator
from itertools import chain, combinations
from math import sqrt

from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.model.count import forward_flops
from optimus.parallel.activations import Activations
from optimus.parallel.recompute import Recomputation

_MARGIN = 1.01  # for scalars and other crumbs, which are not counted
BUSY = 1.5  # tokens of the busiest experts, to the mean: more than routers with a balance loss come to


def choose_recomputation(
    config: ModelConfig, budget: int, context: int, sizes: Callable[[Recomputation], Activations]
) -> tuple[Recomputation, Activations]:
    """(what to recompute so that the peak is at most `budget` bytes, its activations). `sizes` are those of a choice, of
    sequences of `context` tokens.

    Raises `UserError`, naming the least bytes that are possible, when nothing fits.
    """

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
        f"recompute_budget {budget:,} bytes: the activations of a microbatch take {needed:,} bytes at least, with "
        f"{least}: raise it, or lower train.micro_batch or train.sequence_length"
    )


def recomputed_flops(config: ModelConfig, chosen: Recomputation, context: int) -> float:
    """Floating point operations per token that are made again, roughly; attention over half a square."""
    cost = {"norm": 20.0 * config.hidden, **forward_flops(config, context)}
    if "block" in chosen.kinds:
        return config.layers * sum(cost.values())
    return config.layers // chosen.every * sum(cost[kind] for kind in chosen.kinds)


def _candidates(config: ModelConfig, context: int) -> Iterator[Recomputation]:
    modules = ("norm", *forward_flops(config, context))
    sets = chain.from_iterable(combinations(modules, count) for count in range(1, len(modules) + 1))
    yield Recomputation()
    for kinds in (*sets, ("block",)):
        for every in range(1, config.layers + 1):
            yield Recomputation(kinds, every)
