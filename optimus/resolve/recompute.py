"""The choice of activation recomputation (`recompute: auto`): the least with which the activations fit into memory."""

from collections.abc import Callable

from optimus.config.sizes import size_text
from optimus.parallel.activations import Activations
from optimus.parallel.recompute import Recomputation
from optimus.resolve.decision import Decided
from optimus.resolve.memory import live, memory
from optimus.resolve.recompute_choice import BUSY, choose_recomputation
from optimus.resolve.run import ResolvedRun

_SHARE = 0.9  # usable share of the free memory


def recomputation(run: ResolvedRun) -> Decided:
    """Decides the least activation recomputation that fits.

    With `recompute_budget`, the budget limits the activations of a microbatch in the whole model. Otherwise, the limit
    for the live activations of a rank is nine tenths of the memory that the other entries of the rank's account leave.
    Raises `UserError` when nothing fits.
    """
    config = run.config
    if config.recompute != ["auto"]:
        return Decided()
    given = config.recompute_budget
    budget, sizes = _free_bytes(run) if given is None else (given, lambda chosen: run.activations(chosen, load=BUSY))
    chosen, found = choose_recomputation(config.model, budget, run.widest.train.sequence_length, sizes)
    said = f"saves {size_text(found.saved)} of activations, with a peak of {size_text(found.peak)}"
    values = {"recompute": [*chosen.kinds], "recompute_every": chosen.every, "recompute_budget": None}
    return Decided(values, f"{chosen} {said}; {size_text(budget)} are available")


def _free_bytes(run: ResolvedRun) -> tuple[int, Callable[[Recomputation], Activations]]:
    """Returns (least free bytes of all ranks, a function that returns the activations of the rank with the largest adjusted
    peak).

    The adjusted peak of a rank is the rank's peak minus the rank's free bytes beyond the least. One budget then applies
    to all ranks.
    """
    free_bytes = dict[int, int]()
    for rank in run.stage_ranks:
        found = memory(run, rank)
        beside = found.taken(run.facts) - found.activations - found.working
        free_bytes[rank] = max(0, int((run.facts.device_bytes - beside) * _SHARE))
    least = min(free_bytes.values())

    def sizes(chosen: Recomputation) -> Activations:
        adjusted = []
        for rank, free in free_bytes.items():
            activations, working = live(run, rank, BUSY, chosen)
            adjusted.append(Activations(activations, activations + working + least - free))
        return max(adjusted, key=lambda each: each.peak)

    return least, sizes
