"""Resolves the layouts, the state specification and the pruning targets of a run's parameters."""

from collections.abc import Mapping
from typing import Any

import torch

from optimus.config import RunConfig
from optimus.mesh import Layout, Mesh
from optimus.model import CausalModel
from optimus.model.build import causal_model
from optimus.parallel.layouts import parameter_layouts
from optimus.resolve.precision import DTYPES
from optimus.resolve.rules import check_prunable, pruned_by, rules_of, with_factors
from optimus.resolve.run import RunInputs
from optimus.resolve.shapes import tensor_degrees
from optimus.resolve.stages import tied_embeddings
from optimus.state.plan import StateSpec
from optimus.state.pruning import check_blocks


def layouts_of(model: CausalModel, config: RunConfig) -> dict[str, Layout]:
    """Returns the layout of each parameter, by name. `model` must be unsharded."""
    return parameter_layouts(model, **layout_options(config))


def layout_options(config: RunConfig) -> dict[str, Any]:
    """Returns the options of `parallel.layouts.parameter_layouts` for a model with all blocks of a run."""
    return {
        "sequence": config.parallel.splits_sequence,
        "duplicates": not config.moe.drop_duplicates,
        "tied_embeddings": tied_embeddings(config),
        "vocabulary": config.parallel.vocabulary,
        "degrees": tensor_degrees(config),
    }


def full_model(config: RunConfig) -> CausalModel:
    """Builds the model with all stages on the meta device."""
    with torch.device("meta"):
        return with_factors(causal_model(config.model, config.moe.force_balanced), config.train)


def state_spec_of(config: RunConfig, model: CausalModel, inputs: RunInputs) -> StateSpec:
    """Returns the state specification at the start of the run. `model` must have all pipeline stages."""
    rules, pruning = rules_of(config.optimizer, model, config.train.freeze), config.pruning
    targets = pruned_by(pruning, model, rules, tied=config.model.tie_embeddings)
    check_prunable("the initial weights are pruned", inputs.unpruned, rules)
    first = pruning.unpruned(0) if pruning is not None and pruning.comes_first and inputs.begins else None
    unpruned = (
        dict.fromkeys(targets) | dict(inputs.unpruned) | (dict.fromkeys(targets, first) if first is not None else {})
    )
    return StateSpec(
        DTYPES[config.train.precision], rules, unpruned, pruning.indices if pruning is not None else "int32"
    )


def check_blocks_of(config: RunConfig, model: CausalModel, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Raises `UserError` if a target of block pruning has fewer than two dims or a block that spans ranks."""
    if config.pruning is not None and config.pruning.scope.startswith("block"):
        check_blocks({name: layouts[name] for name in targets_of(config, model)}, mesh)


def targets_of(config: RunConfig, model: CausalModel) -> dict[str, int]:
    """Returns the number of elements of each parameter that the run prunes. `model` must be unsharded."""
    rules = rules_of(config.optimizer, model, config.train.freeze)
    names = pruned_by(config.pruning, model, rules, tied=config.model.tie_embeddings)
    return {name: model.get_parameter(name).numel() for name in names}
