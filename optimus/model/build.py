"""Builds the model of an architecture."""

from collections.abc import Iterable

from optimus.model.architecture import Architecture, ModelConfig
from optimus.model.causal import CausalModel
from optimus.model.transformer import Transformer


def causal_model(
    config: Architecture, force_balanced: bool = False, layers: Iterable[int] | None = None
) -> CausalModel:
    """Builds a model with uninitialised parameters on the default device.

    A `Transformer` has the blocks of `layers`, by default all. With `force_balanced`, its routers distribute tokens
    evenly over experts.
    """
    if isinstance(config, ModelConfig):
        return Transformer(config, force_balanced, layers)
    from optimus.model.foreign.building import adapted_model

    return adapted_model(config)
