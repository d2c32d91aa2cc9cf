"""The parameters of a run: their layouts, and what is kept of each."""

from collections.abc import Mapping

import torch

from optimus.config import RunConfig
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.parallel.layouts import parameter_layouts
from optimus.resolve.precision import DTYPES
from optimus.resolve.rules import check_prunable, pruned_by, rules_of, with_factors
from optimus.resolve.run import RunInputs
from optimus.resolve.stages import tied_embeddings
from optimus.state.plan import Recipe
from optimus.state.pruning import check_blocks


def layouts_of(model: Transformer, config: RunConfig) -> dict[str, Layout]:
    """The layouts of the parameters of `model`, which holds them whole."""
    return parameter_layouts(model, **layout_options(config))


def layout_options(config: RunConfig) -> dict[str, bool]:
    """What `parallel.layouts.parameter_layouts` is to know of a run."""
    return {
        "sequence": config.parallel.splits_sequence,
        "duplicates": not config.moe.drop_duplicates,
        "tied_embeddings": tied_embeddings(config),
        "vocabulary": config.parallel.vocabulary,
    }


def whole_model(config: RunConfig) -> Transformer:
    """The model with all its stages, without memory for its parameters."""
    with torch.device("meta"):
        return with_factors(Transformer(config.model, config.moe.force_balanced), config.train)


def recipe_of(config: RunConfig, model: Transformer, inputs: RunInputs) -> Recipe:
    """What a run keeps of the parameters of `model`, which holds them whole, when it begins. Raises `UserError` for such as
    cannot be pruned."""
    rules, pruning = rules_of(config.optimizer, model, config.train.freeze), config.pruning
    targets = pruned_by(pruning, model, rules, tied=config.model.tie_embeddings)
    check_prunable("what the run begins with is pruned", inputs.unpruned, rules)
    first = pruning.unpruned(0) if pruning is not None and pruning.comes_first and inputs.begins else None
    unpruned = (
        dict.fromkeys(targets) | dict(inputs.unpruned) | (dict.fromkeys(targets, first) if first is not None else {})
    )
    return Recipe(DTYPES[config.train.precision], rules, unpruned, pruning.indices if pruning is not None else "int32")


def check_blocks_of(config: RunConfig, model: Transformer, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Raise `UserError` where the run prunes by blocks and its targets have none whole. What it begins with may be pruned
    otherwise."""
    if config.pruning is not None and config.pruning.scope.startswith("block"):
        check_blocks({name: layouts[name] for name in targets_of(config, model)}, mesh)


def targets_of(config: RunConfig, model: Transformer) -> dict[str, int]:
    """The parameters of `model`, which holds them whole, that the run prunes, and their elements."""
    rules = rules_of(config.optimizer, model, config.train.freeze)
    names = pruned_by(config.pruning, model, rules, tied=config.model.tie_embeddings)
    return {name: model.get_parameter(name).numel() for name in names}
