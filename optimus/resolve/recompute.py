"""What a run recomputes where it is left open (`recompute: auto`): the least with which activations fit."""

from optimus.parallel.recompute_choice import choose_recomputation
from optimus.resolve.decision import Decided
from optimus.resolve.run import ResolvedRun
from optimus.state.plan import bytes_by_kind

_SHARE = 0.9  # of the free memory


def recomputation(run: ResolvedRun) -> Decided:
    """The least that fits beside the state of the fullest rank. Raises `UserError` when nothing fits."""
    config = run.config
    if config.recompute != ["auto"]:
        return Decided()
    budget = config.recompute_budget
    if budget is None:
        held = (
            sum(bytes_by_kind(run.chunk_plans(rank)).values()) + run.teacher_bytes(rank) for rank in run.stage_ranks
        )
        budget = max(0, int((run.facts.device_bytes - max(held)) * _SHARE))
    chosen, activations = choose_recomputation(config.model, budget, **run.shapes)
    sizes = f"keeps {_mib(activations.saved)} of activations of a microbatch, {_mib(activations.peak)} at the peak"
    values = {"recompute": [*chosen.kinds], "recompute_every": chosen.every, "recompute_budget": None}
    return Decided(values, f"{chosen} {sizes}, of {_mib(budget)}")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
