"""Configurations of `transformers`, and the facts and shapes of their models."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import torch

from optimus.errors import UserError
from optimus.model.foreign.facts import facts_of
from optimus.model.foreign.needed import needed_transformers, silent_transformers
from optimus.model.foreign.records import ModelFacts
from optimus.model.foreign.twin import build


def hf_config(text: str) -> Any:
    """Returns the configuration of `transformers` from the JSON text of a config.json. Raises `UserError` for remote
    code (`auto_map`), and for a configuration that `transformers` refuses."""
    needed_transformers()
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    raw = json.loads(text, object_hook=_decoded)
    if raw.pop("auto_map", None) is not None:
        raise UserError(
            "model.transformers: auto_map names code outside of `transformers`, which is never run: remove auto_map, or "
            "register the model through a plugin"
        )
    _check(raw)
    try:
        with silent_transformers():
            config = AutoConfig.for_model(**raw)
    except Exception as error:  # `transformers` and its validators raise many classes of errors
        said = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"model.transformers: {said}: change it in the configuration") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model.transformers: `transformers` has no causal language model of model_type '{config.model_type}': choose "
            "another model"
        )
    return config


# Settings that are numbers from 1 in every model that has them.
_POSITIVE = {"hidden_size", "n_embd", "d_model", "vocab_size", "num_attention_heads", "n_head", "n_heads", "num_heads"}
_POSITIVE |= {
    "num_key_value_heads",
    "num_kv_heads",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "head_dim",
}


def _check(raw: Mapping[str, Any]) -> None:
    """Raises `UserError` for an unknown model, and for sizes that no model has."""
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        close = get_close_matches(str(kind), list(CONFIG_MAPPING.keys()), n=1)
        cure = f"did you mean '{close[0]}'?" if close else "choose another model, or a newer version of `transformers`"
        raise UserError(f"model.transformers: model_type is {kind!r}, which `transformers` does not have: {cure}")
    for name, value in raw.items():
        if name in _POSITIVE and type(value) is int and value < 1:
            raise UserError(f"model.transformers: {name} is {value}: it must be 1 or more")
    window = raw.get("sliding_window")
    if type(window) is int and window < 1 and raw.get("use_sliding_window", True):
        raise UserError(f"model.transformers: sliding_window is {window}: it must be 1 or more, or null")
    heads, shared = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and heads % shared:
        raise UserError(
            f"model.transformers: num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}: change "
            "one of them"
        )


def _decoded(found: dict[str, Any]) -> Any:
    """Decodes a mapping with the only key `__float__`, as `transformers` writes an infinity. Returns any other mapping
    unchanged."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


@lru_cache(maxsize=16)
def facts_of_text(text: str) -> ModelFacts:
    """Returns the facts of the model whose config.json is `text`."""
    with torch.device("cpu"), silent_transformers():
        return facts_of(hf_config(text))


@lru_cache(maxsize=16)
def shapes_of_text(text: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of the model whose config.json is `text`, by name."""
    with torch.device("cpu"), silent_transformers():
        return {name: tuple(each.shape) for name, each in build(hf_config(text), "sdpa", "meta").named_parameters()}
