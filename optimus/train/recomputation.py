"""What a run recomputes: as configured, or chosen to fit (`recompute: auto`)."""

from typing import Any

from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.mesh import Mesh
from optimus.parallel.activations import Activations
from optimus.parallel.build import StageOptions
from optimus.parallel.recompute import Recomputation
from optimus.parallel.recompute_choice import choose_recomputation
from optimus.train.teacher import teacher_models

_SHARE = 0.9  # of the free memory


def find_recomputation(config: RunConfig, groups: Groups, itemsize: int, free: int) -> tuple[Recomputation, str | None]:
    """(what to recompute, what the user should know about a choice).

    Computation is in a type of `itemsize` bytes, and `free` bytes are left beside the state on this rank. All ranks must
    call, and find the same. Raises `UserError` when nothing fits.
    """
    if config.recompute != ["auto"]:
        return Recomputation(tuple(config.recompute), config.recompute_every), None
    if config.recompute_budget is None:
        free = min(groups.world.all_gather_object(free))
    chosen, activations, budget = chosen_recomputation(config, groups.mesh, itemsize, free)
    sizes = f"keeps {_mib(activations.saved)} of activations of a microbatch, {_mib(activations.peak)} at the peak"
    return chosen, f"recompute: auto takes {chosen}, which {sizes}, of {_mib(budget)}"


def chosen_recomputation(
    config: RunConfig, mesh: Mesh, itemsize: int, free: int
) -> tuple[Recomputation, Activations, int]:
    """(what `recompute: auto` takes, the activations of a microbatch then, the most bytes that they may take).

    Raises `UserError` when nothing fits.
    """
    budget = config.recompute_budget or max(0, int(free * _SHARE))
    return *choose_recomputation(config.model, budget, **activation_shapes(config, mesh, itemsize)), budget


def stage_options(config: RunConfig, chosen: Recomputation | None = None) -> StageOptions:
    """How the model is divided, as configured; `chosen` is recomputed."""
    assert config.moe.dispatch != "auto", "with_dispatcher comes first"
    return StageOptions(
        routing=config.moe.routing,
        sequence=config.parallel.splits_sequence,
        overlap=config.parallel.overlap,
        vocabulary=config.parallel.vocabulary,
        context_method=config.parallel.context_method,
        duplicates=not config.moe.drop_duplicates,
        dispatch=config.moe.dispatch,
        recomputation=chosen or Recomputation(),
        keep_collectives=config.recompute_collectives == "keep",
    )


def activation_shapes(config: RunConfig, mesh: Mesh, itemsize: int) -> dict[str, Any]:
    """What `activation_bytes` is to know of a run, besides the model and what is recomputed."""
    return {
        "micro_batch": config.train.micro_batch,
        "context": config.train.sequence_length,
        "itemsize": itemsize,
        "mesh": mesh,
        "options": stage_options(config),
        "teachers": teacher_models(config),
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
