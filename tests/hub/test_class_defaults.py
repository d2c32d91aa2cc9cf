"""Folders of `transformers` with the defaults of its configuration classes, but small sizes, are imported, trained,
exported and compared, for every family. Every field of config.json is known."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from helpers.sweep import in_turns
from optimus.checkpoint.store import load_model
from optimus.errors import UserError
from optimus.hub import export_checkpoint, import_folder, read_model_folder
from optimus.model.families import families

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "vocab_size": 320,
    "n_embd": 32,
    "n_head": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
HEADS, EXPERTS = {"num_key_value_heads": 2, "head_dim": 8}, {"num_experts": 16}
# Enough layers for every kind, and at most as many key heads as query heads.
OWN: dict[str, dict[str, int]] = {
    "olmo": {},
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4},
    "olmoe": EXPERTS,
    "llama": {"head_dim": 8},
    "mistral": HEADS,
    "mixtral": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3_moe": {"num_key_value_heads": 2, **EXPERTS},
    "deepseek_v3": {"num_hidden_layers": 4, "num_key_value_heads": 4, "n_routed_experts": 16},
    "gpt_oss": {**HEADS, "num_local_experts": 8},
    "gpt2": {"n_layer": 2},
    "opt": {},
    "gemma2": HEADS,
    "gemma3_text": {**HEADS, "num_hidden_layers": 7},
}
PUBLISHED = [name for name, family in families().items() if family.architecture]
# Fields that an export leaves out: facts of the original folder, and settings without a counterpart here.
UNSAID = {"dtype", "architectures", "transformers_version", "_name_or_path", "_attn_implementation_internal"}
EOS = 0  # end-of-text of the data
# These fields are null in the original folder.
SAID_IN_FULL = {"mixtral": {"head_dim": 8}, "gpt2": {"n_inner": 128}}
TOKENS_BS = torch.arange(40).view(2, 20)


def class_of(name: str) -> type:
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]


def small(name: str) -> Any:
    """Returns the default configuration of a family's class with small sizes."""
    usual = class_of(name)().to_dict()
    sizes = {field: size for field, size in SMALL.items() if usual.get(field) is not None}
    layers = {} if name == "gpt2" else {"num_hidden_layers": 2}
    return class_of(name)(**(sizes | layers | OWN[name]))


def folder_of(name: str, path: Path) -> Path:
    """Writes a folder with `transformers`, with all weights random."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(small(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    return path


def loaded(path: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(TOKENS_BS)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("name", in_turns([*PUBLISHED], 4, always=5))
def test_imported_trained_exported(name: str, small_run: dict[str, Any], tmp_path: Path) -> None:
    theirs = loaded(folder_of(name, tmp_path / "theirs"))
    import_folder(tmp_path / "theirs", tmp_path / "imported")
    assert (logits(load_model(tmp_path / "imported")) - logits(theirs)).abs().max() < 1e-5
    train = small_run["train"] | {"steps": 2, "precision": "float32"}
    optimus.train(small_run | {"model": str(tmp_path / "theirs"), "train": train})
    export_checkpoint(tmp_path / "run", tmp_path / "ours")
    trained, ours = load_model(tmp_path / "run"), loaded(tmp_path / "ours")
    assert (logits(ours) - logits(trained)).abs().max() < 1e-5
    assert (logits(ours) - logits(theirs)).abs().max() > 1e-3  # two steps have changed the weights
    before, after = theirs.config.to_dict() | SAID_IN_FULL.get(name, {}), ours.config.to_dict()
    family = families()[name]
    without = {*UNSAID, *family.dropout, *([family.further.field] if family.further else [])}
    assert ours.config.max_position_embeddings == theirs.config.max_position_embeddings > 32
    # The exported token ids lack those above this small vocabulary, and have the data's end-of-text.
    known = {field: before[field] for field in before if field.endswith("_token_id") and (before[field] or 0) < 320}
    tokens = {field: known.get(field) for field in before if field.endswith("_token_id")}
    ends = [EOS, tokens["eos_token_id"]] if tokens["eos_token_id"] else EOS
    expected = before | tokens | {"eos_token_id": ends}
    assert {field: after[field] for field in expected.keys() - without} == {
        field: value for field, value in expected.items() if field not in without
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_that_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    """A family refuses fields that its configuration class does not have."""
    small(name).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    read_model_folder(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"new_gate": True}))
    with pytest.raises(UserError, match=rf"config.json: new_gate is True: an unknown field of family {name}, which"):
        read_model_folder(tmp_path)


FURTHER = ("enorm.weight", "self_attn.o_proj.weight", "shared_head.head.weight")


def test_layers_that_predict_further_tokens_are_left_out(
    small_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = folder_of("deepseek_v3", tmp_path / "theirs")
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert import_folder(folder, tmp_path / "without")["left_out"] is None  # `transformers` does not write these layers
    tensors = load_file(folder / "model.safetensors")
    further = {f"model.layers.4.{name}": torch.ones(2, 2, dtype=torch.bfloat16) for name in FURTHER}
    save_file(tensors | further, folder / "model.safetensors")
    made = import_folder(folder, tmp_path / "imported")
    said = f"{folder}: left out layer 4 (3 tensors) for multi-token prediction, as transformers does"
    assert (made["left_out"], made["dtype"]) == (said, "float32")
    train = small_run["train"] | {"steps": 1, "precision": "float32"}
    optimus.train(small_run | {"model": str(folder), "train": train})
    assert capsys.readouterr().err.splitlines().count(said) == 1
    export_checkpoint(tmp_path / "run", tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not [name for name in load_file(tmp_path / "ours" / "model.safetensors") if ".layers.4." in name]
    save_file(tensors | {"model.layers.5.enorm.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"holds the tensor model.layers.5.enorm.weight \(and 0 more\)"):
        import_folder(folder, tmp_path / "refused")
