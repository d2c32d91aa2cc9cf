"""The parameters of a run: their layouts and the specification of their state."""

from collections.abc import Mapping

import torch

from optimus.config import RunConfig
from optimus.mesh import Layout, Mesh
from optimus.model import CausalModel
from optimus.model.build import causal_model
from optimus.parallel.layouts import parameter_layouts
from optimus.resolve.precision import DTYPES
from optimus.resolve.rules import check_prunable, pruned_by, rules_of, with_factors
from optimus.resolve.run import RunInputs
from optimus.resolve.stages import tied_embeddings
from optimus.state.plan import StateSpec
from optimus.state.pruning import check_blocks


def layouts_of(model: CausalModel, config: RunConfig) -> dict[str, Layout]:
    """Returns the layouts of the parameters of the unsharded `model`."""
    return parameter_layouts(model, **layout_options(config))


def layout_options(config: RunConfig) -> dict[str, bool]:
    """Returns the arguments of `parallel.layouts.parameter_layouts` for a run."""
    return {
        "sequence": config.parallel.splits_sequence,
        "duplicates": not config.moe.drop_duplicates,
        "tied_embeddings": tied_embeddings(config),
        "vocabulary": config.parallel.vocabulary,
    }


def full_model(config: RunConfig) -> CausalModel:
    """Builds the model with all stages on the meta device, so that the parameters take no memory."""
    with torch.device("meta"):
        return with_factors(causal_model(config.model, config.moe.force_balanced), config.train)


def state_spec_of(config: RunConfig, model: CausalModel, inputs: RunInputs) -> StateSpec:
    """Returns the specification of the state of the unsharded `model` at the start of the run.

    Raises `UserError` like `rules_of` and `pruned_by`, and if the initial weights prune a parameter whose update rule
    needs whole matrices.
    """
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
    """Raises `UserError` if the run prunes by blocks and a target is not a matrix or has a block that several ranks would
    share.

    The check skips parameters that only the initial weights prune.
    """
    if config.pruning is not None and config.pruning.scope.startswith("block"):
        check_blocks({name: layouts[name] for name in targets_of(config, model)}, mesh)


def targets_of(config: RunConfig, model: CausalModel) -> dict[str, int]:
    """Returns the parameters of the unsharded `model` that the run prunes, with their numbers of elements."""
    rules = rules_of(config.optimizer, model, config.train.freeze)
    names = pruned_by(config.pruning, model, rules, tied=config.model.tie_embeddings)
    return {name: model.get_parameter(name).numel() for name in names}
