"""Families: what their files declare is what the models have, and a new one is a new file."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.hub.config_json import read_model, write_config
from optimus.hub.keys import published
from optimus.model import Transformer
from optimus.model import families as package
from optimus.model.families import families, family_named

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 24, "vocab": 48}
SPARSE = {"experts": 4, "experts_per_token": 2}


def model_of(name: str) -> ModelConfig:
    return ModelConfig(family=name, **SIZES, **(SPARSE if "experts" in families()[name].fields else {}))


@pytest.mark.parametrize("name", families())
def test_the_key_table_has_every_parameter_once(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(model_of(name))
    names = [key for own, parameter in model.named_parameters() for key, _ in published(name, own, parameter)]
    assert len(names) == len(set(names)) > 0
    kinds = {
        ".".join("{i}" if part.isdigit() else part for part in own.split(".")) for own, _ in model.named_parameters()
    }
    assert kinds == set(families()[name].keys)


@pytest.mark.parametrize("name", families())
def test_config_json_there_and_back(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    write_config(model, tmp_path, context=64, eos_id=None, pad_id=None, dtype="float32")
    assert read_model(tmp_path) == model


def test_what_a_family_does_not_have_is_refused() -> None:
    with pytest.raises(ValidationError, match="qk_norm is 'whole', but 'none' in all models of family olmo: remove it"):
        ModelConfig(family="olmo", **SIZES, qk_norm="whole")
    with pytest.raises(ValueError, match="family 'olmeo' is not known here, but olmo, olmoe: did you mean 'olmo'"):
        family_named("olmeo")


MADE_UP = """
from optimus.model.families.common import CONSTANTS, EQUAL, KEYS, LAYER, MLP, OPTIONAL, SIZES
from optimus.model.families.family import Family, Key

FAMILY = Family(
    model_type="madeup",
    architecture="MadeUpForCausalLM",
    defaults={"norm": "rms", "rope_theta": 7.0},
    fields=SIZES,
    optional=OPTIONAL | {"norm_eps": "rms_norm_eps"},
    constants=CONSTANTS,
    equal=EQUAL,
    keys=KEYS
    | {
        "blocks.{i}.attention_norm.weight": Key((LAYER + "input_layernorm.weight",)),
        "blocks.{i}.mlp_norm.weight": Key((LAYER + "post_attention_layernorm.weight",)),
        "blocks.{i}.mlp.gate_up.weight": Key((MLP + "gate_proj.weight", MLP + "up_proj.weight")),
        "blocks.{i}.mlp.down.weight": Key((MLP + "down_proj.weight",)),
        "final_norm.weight": Key(("model.norm.weight",)),
    },
)
"""


def test_a_family_is_added_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "madeup.py").write_text(MADE_UP)
    with monkeypatch.context() as patched:
        patched.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        families.cache_clear()
        model = ModelConfig(family="madeup", **SIZES)
        assert (model.norm, model.qk_norm, model.rope_theta) == ("rms", "none", 7.0)
        test_the_key_table_has_every_parameter_once("madeup")
        (tmp_path / "folder").mkdir()
        write_config(model, tmp_path / "folder", context=64, eos_id=None, pad_id=None, dtype="float32")
        assert read_model(tmp_path / "folder") == model
    families.cache_clear()
    with pytest.raises(UserError, match="model_type is 'madeup': only olmo and olmoe can be read"):
        read_model(tmp_path / "folder")
