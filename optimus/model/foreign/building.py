"""Builds the `ForeignModel`s of `transformers` and of plugins."""

import math
from typing import Any

import torch
from torch import Tensor

from optimus.model.batch import Batch
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.described import built
from optimus.model.foreign.initial import Initial as Noted
from optimus.model.foreign.model import ForeignModel, materialised
from optimus.model.foreign.plugin import PluginModel
from optimus.model.foreign.rows import MODELS
from optimus.model.parameters import Initial, Normal, Uniform, Values


def adapted_model(config: TransformersModel | PluginModel) -> ForeignModel:
    """Builds a model with uninitialised parameters on the default device."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        model = _plugin_model(config) if isinstance(config, PluginModel) else _transformers_model(config)
    return model if device.type == "meta" else materialised(model, device)


def _plugin_model(config: PluginModel) -> ForeignModel:
    described = built(MODELS[config.plugin], config.arguments)
    forward = described.spec.forward
    return ForeignModel(config, described.spec.module, described.initial, lambda body, batch, *_: forward(body, batch))


def _transformers_model(config: TransformersModel) -> ForeignModel:
    from optimus.model.foreign.attention import NAME  # imports `transformers`
    from optimus.model.foreign.configuration import hf_config
    from optimus.model.foreign.initial import initial_values
    from optimus.model.foreign.needed import silent_transformers
    from optimus.model.foreign.twin import build

    with silent_transformers():
        body = build(hf_config(config.text), NAME if config.facts.attention else "sdpa", "meta")
        initial = {name: _declared(noted) for name, noted in initial_values(body).items()}
    return ForeignModel(config, body, initial, _call_transformers, caches=True)


def _call_transformers(body: Any, batch: Batch, position_BS: Tensor | None, routes: bool) -> Any:
    options: dict[str, Any] = {} if position_BS is None else {"position_ids": position_BS}
    # The author's auxiliary loss fails without router logits.
    if getattr(body.config, "output_router_logits", False) and not routes:
        options["output_router_logits"] = False
    return body(input_ids=batch.tokens_BS, use_cache=False, **options)


def _declared(noted: Noted) -> Initial:
    if noted.kind == "constant":
        return noted.value
    if noted.kind == "values":
        assert noted.values is not None
        return Values(noted.values)
    low, high = (-math.inf if noted.low is None else noted.low), (math.inf if noted.high is None else noted.high)
    return Uniform(low, high) if noted.kind == "uniform" else Normal(noted.std, noted.mean, low, high)
