"""The choice of activation recomputation (`recompute: auto`): the least for which the activations fit."""

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

    With `recompute_budget`, the activations of a microbatch must fit into the budget. Otherwise, the live activations of
    each rank must fit beside the rest of its memory account. Raises `UserError` when nothing fits.
    """
    config = run.config
    if config.recompute != ["auto"]:
        return Decided()
    given = config.recompute_budget
    budget, sizes = _left(run) if given is None else (given, lambda chosen: run.activations(chosen, load=BUSY))
    chosen, found = choose_recomputation(config.model, budget, run.widest.train.sequence_length, sizes)
    said = f"keeps {size_text(found.saved)} of activations, {size_text(found.peak)} at the peak"
    values = {"recompute": [*chosen.kinds], "recompute_every": chosen.every, "recompute_budget": None}
    return Decided(values, f"{chosen} {said}, of {size_text(budget)}")


def _left(run: ResolvedRun) -> tuple[int, Callable[[Recomputation], Activations]]:
    """Returns (free bytes of the fullest rank, a function that returns the tightest rank's activations).

    A rank with more free bytes than the fullest counts as saving that many bytes less.
    """
    rooms = dict[int, int]()
    for rank in run.stage_ranks:
        found = memory(run, rank)
        beside = found.taken(run.facts) - found.activations - found.working
        rooms[rank] = max(0, int((run.facts.device_bytes - beside) * _SHARE))
    least = min(rooms.values())

    def sizes(chosen: Recomputation) -> Activations:
        kept = []
        for rank, room in rooms.items():
            activations, working = live(run, rank, BUSY, chosen)
            kept.append(Activations(activations, activations + working + least - room))
        return max(kept, key=lambda each: each.peak)

    return least, sizes
