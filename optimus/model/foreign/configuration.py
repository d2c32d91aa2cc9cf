"""Configurations of `transformers`, and the facts and shapes of their models."""

import json
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
    from transformers import AutoConfig

    raw = json.loads(text, object_hook=_decoded)
    if "auto_map" in raw:
        raise UserError(
            "model.transformers: auto_map names code outside of `transformers`, which is never run: remove auto_map, or "
            "register the model through a plugin"
        )
    try:
        with silent_transformers():
            return AutoConfig.for_model(**raw)
    except Exception as error:  # `transformers` and its validators raise many classes of errors
        raise UserError(f"model.transformers: {' '.join(str(error).split())}") from None


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
