"""The choice of activation recomputation for `recompute: auto`."""

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
    """Decides `recompute: auto`: the least recomputation that fits into `recompute_budget`, by default free memory.

    Raises `UserError` if no recomputation fits.
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
    """Returns (least usable bytes of any rank, function from a recomputation to the activations of a rank).

    The function lowers the peak of each rank by the rank's usable bytes above the least, and returns the activations
    with the highest lowered peak.
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
