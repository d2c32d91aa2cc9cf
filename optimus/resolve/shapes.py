"""Translates a run's configuration into stage options and arguments of `activation_bytes`."""

from typing import Any

from optimus.config import Architecture, RunConfig
from optimus.mesh import Mesh
from optimus.optim.losses import token_loss
from optimus.parallel.degrees import TensorDegrees
from optimus.parallel.options import StageOptions
from optimus.parallel.recompute import Recomputation
from optimus.resolve.precision import DTYPES
from optimus.resolve.stages import splits_backward


def stage_options(config: RunConfig, recomputation: Recomputation | None = None) -> StageOptions:
    """Returns the stage options of `config`, by default without recomputation. `moe.dispatch` must not be `auto`."""
    assert config.moe.dispatch != "auto", "`moe.dispatch` must be decided before"
    return StageOptions(
        force_balanced=config.moe.force_balanced,
        sequence=config.parallel.splits_sequence,
        degrees=tensor_degrees(config),
        overlap=config.parallel.overlap,
        vocabulary=config.parallel.vocabulary,
        context_method=config.parallel.context_method,
        duplicates=config.model.is_adapted or not config.moe.drop_duplicates,
        dispatch=config.moe.dispatch,
        recomputation=recomputation or Recomputation(),
        keep_collectives=config.recompute_collectives == "keep",
        loss=token_loss(config.train.loss.name, config.train.loss.options),
    )


def tensor_degrees(config: RunConfig) -> TensorDegrees:
    """Returns the layers with fewer tensor-parallel ranks than the run."""
    return TensorDegrees(config.parallel.tensor_ranges)


def recomputation_of(config: RunConfig) -> Recomputation:
    """Returns the recomputation of activations in each layer; none by `recompute: auto`."""
    ranges = tuple((each.range, tuple(each.recompute)) for each in config.parallel.layers if each.recompute is not None)
    kinds = tuple(kind for kind in config.recompute if kind != "auto")
    return Recomputation(kinds, config.recompute_every, ranges)


def activation_shapes(
    config: RunConfig, mesh: Mesh, teachers: tuple[Architecture, ...], itemsize: int | None = None
) -> dict[str, Any]:
    """Returns arguments of `activation_bytes` for a microbatch of `config`.

    By default, `itemsize` is the size in bytes of an element in `train.precision`. `moe.dispatch` must not be `auto`.
    """
    return {
        "micro_batch": config.train.micro_batch,
        "context": config.train.sequence_length,
        "itemsize": itemsize or DTYPES[config.train.precision].itemsize,
        "mesh": mesh,
        "options": stage_options(config),
        "splits": splits_backward(config),
        "teachers": teachers,
    }
