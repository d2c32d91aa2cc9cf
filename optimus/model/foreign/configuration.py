"""Configurations of `transformers`, and the facts and shapes of their models."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import torch

from optimus.errors import UserError, said
from optimus.model.foreign.code import CAUSAL, code_class
from optimus.model.foreign.facts import facts_of
from optimus.model.foreign.needed import needed_transformers, silent_transformers
from optimus.model.foreign.records import ModelFacts
from optimus.model.foreign.twin import build


def hf_config(text: str) -> Any:
    """Creates the `transformers` configuration from the JSON text of a config.json.

    Raises `UserError` for invalid settings, for a model other than a causal language model, and for remote code
    (`auto_map`) in a folder that the user has not named as a plugin.
    """
    needed_transformers()
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    raw = json.loads(text, object_hook=_decoded)
    written = code_class(raw, "AutoConfig")
    _check(raw, known=written is None)
    try:
        with silent_transformers():
            config = AutoConfig.for_model(**raw) if written is None else written.from_dict(raw)
    except (Exception, SystemExit) as error:  # validators and the author's code raise many classes of errors
        told = " ".join(str(error).split()).rstrip(".") if written is None else said(error)
        raise UserError(f"model.transformers: {told}: change it in the configuration") from None
    if code_class(raw, CAUSAL) is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model.transformers: `transformers` has no causal language model of model_type '{config.model_type}': choose "
            "another model"
        )
    return config


# Settings that must be at least 1.
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


def _check(raw: Mapping[str, Any], *, known: bool) -> None:
    """Raises `UserError` for an impossible size and, if `known`, for a model that `transformers` does not have."""
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if known and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
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
    """Decodes a float that `transformers` has written as `{"__float__": text}`."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


@lru_cache(maxsize=16)
def facts_of_text(text: str) -> ModelFacts:
    """Returns the facts of the model with the config.json `text`."""
    with torch.device("cpu"), silent_transformers():
        return facts_of(hf_config(text))


@lru_cache(maxsize=16)
def shapes_of_text(text: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters by name, from the text of a config.json."""
    with torch.device("cpu"), silent_transformers():
        return {name: tuple(each.shape) for name, each in build(hf_config(text), "sdpa", "meta").named_parameters()}
