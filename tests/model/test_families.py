"""Families: models have the parts that their family's file declares; a new family is a new file."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from helpers.families import LATENT, SIZES, needed
from helpers.plugin_tables import tables_restored
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.hub.config_json import read_model, write_config
from optimus.hub.exporting import export_model
from optimus.hub.keys import published
from optimus.model import Transformer
from optimus.model.families import FAMILIES, families, family_named
from optimus.model.norms import NORMS
from optimus.model.parameters import named_tensors

OPTIONS = {"dense_layers": 1, "kv_heads": 1, "attention_bias": "all", "mlp_bias": True, "tie_embeddings": False}


def model_of(name: str, **options: object) -> ModelConfig:
    return ModelConfig.model_validate({"family": name, **SIZES, **needed(name), **options})


PUBLISHED = [name for name, family in families().items() if family.architecture]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_key_table_has_every_parameter_once(name: str) -> None:
    kinds = set()
    optional = {option: value for option, value in OPTIONS.items() if option in families()[name].varies}
    compressed = {"latent": {**LATENT, "queries": 5}} if "latent" in families()[name].varies else {}
    for options in ({}, optional, {**optional, "kv_heads": 2, **compressed}):
        with torch.device("meta"):
            model = Transformer(model_of(name, **options))
        tensors = dict(named_tensors(model))
        names = [key for own, tensor in tensors.items() for key, *_ in published(name, own, tensor)]
        assert len(names) == len(set(names)) > 0
        own = (name.split(".") for name in tensors)
        kinds |= {".".join("{i}" if part.isdigit() else part for part in parts) for parts in own}
    surplus = set(families()[name].keys) - kinds
    assert kinds <= set(families()[name].keys)
    assert surplus <= {"blocks.{i}.attention.out.bias"}  # Qwen 2 has all biases but this one


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("layers", [4, 9])
def test_config_json_there_and_back(name: str, layers: int, tmp_path: Path) -> None:
    model = model_of(name, layers=layers)
    write_config(model, tmp_path, context=64, dtype="float32")
    assert read_model(tmp_path) == model


def test_what_a_family_does_not_have_is_refused() -> None:
    with pytest.raises(ValidationError, match="qk_norm is 'whole', but 'none' in all models of family olmo: remove it"):
        ModelConfig(family="olmo", **SIZES, qk_norm="whole")
    with pytest.raises(ValueError, match=r"family 'olmeo' is unknown; known are .*olmo2.*: did you mean 'olmo"):
        family_named("olmeo")


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("olmo", {"norm_eps": 1e-6}, "model.norm_eps is 1e-06, but 1e-05 in all models of OlmoForCausalLM"),
        ("llama", {"norm": "layer"}, "model.norm is layer, but rms in all models of LlamaForCausalLM"),
        ("gemma2", {"norm_place": "after"}, "model.norm_place is after, but both in all models of Gemma2ForCausalLM"),
        ("llama", {"attention_bias": "qkv"}, "model.attention_bias is qkv, but none or all in all models of LlamaFor"),
    ],
)
def test_a_model_that_transformers_has_not_is_no_export(
    family: str, fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    """A model without a counterpart in `transformers` may be trained, but its export is refused and writes nothing."""
    with torch.device("meta"):
        model = Transformer(model_of(family, **fields))
    with pytest.raises(UserError, match=message):
        export_model(model, tmp_path / "exported", context=64, tokenizer=None, eos_id=None)
    assert not [*tmp_path.iterdir()]


def test_every_norm_is_in_the_table() -> None:
    assert set(get_args(ModelConfig.model_fields["norm"].annotation)) == set(NORMS)


@pytest.mark.parametrize(
    ("family", "defaults", "message"),
    [
        ("olmoe", {"gated": False}, "experts need a gated feed-forward layer: set gated"),
        (
            "olmo",
            {"activation": "clamped_silu", "gated": False},
            "clamped_silu needs a gated feed-forward layer: set gated",
        ),
        (
            "deepseek_v3",
            {"attention_sinks": True},
            "attention_sinks is True, but False with latent attention: remove it",
        ),
        ("deepseek_v3", {"score_cap": 5.0}, "score_cap is 5.0, but None with latent attention: remove it"),
    ],
)
def test_what_cannot_be_combined(family: str, defaults: dict[str, object], message: str) -> None:
    base = model_of(family).model_dump(exclude_unset=True) | {"family": "combined"}
    known = family_named(family)
    combined = replace(known, model_type="combined", defaults={**known.defaults, **defaults})
    with tables_restored():
        FAMILIES.extend({"combined": combined})
        with pytest.raises(ValidationError, match=message):
            ModelConfig.model_validate(base | defaults)
