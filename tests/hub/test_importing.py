"""Imports and exports keep every bit; folders that cannot be read give clear errors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimus.checkpoint.folder import find_checkpoint, read_description
from optimus.checkpoint.store import load_model
from optimus.config import ModelConfig
from optimus.config.load import model_config_from
from optimus.errors import UserError
from optimus.hub import (
    FolderReader,
    export_checkpoint,
    export_model,
    import_folder,
    load_weights,
    read_model_folder,
)
from optimus.hub.config_json import read_config
from optimus.model import Transformer
from optimus.model.init import initialize


def exported(model: Transformer, folder: Path, tokenizer: Path | None = None, eos_id: int | None = None) -> Path:
    export_model(model, folder, context=64, tokenizer=tokenizer, eos_id=eos_id)
    return folder


def assert_same_bits(one: Transformer, other: Transformer) -> None:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("fused", [False, True])
def test_folder_saved_by_transformers_is_read_exactly(model: Transformer, tmp_path: Path, fused: bool) -> None:
    transformers = pytest.importorskip("transformers")
    twin = transformers.AutoModelForCausalLM.from_pretrained(exported(model, tmp_path / "first"))
    twin.save_pretrained(tmp_path / "hf", save_original_format=not fused, max_shard_size="10KB")
    names = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    # gpt_oss has only the fused form.
    whole = model.config.experts is not None and (fused or model.config.family == "gpt_oss")
    assert any("experts.gate_up_proj" in name for name in names) == whole
    sections = read_model_folder(tmp_path / "hf")
    assert model_config_from(sections.pop("model"), "folder") == model.config
    assert sections == {"checkpoint": {"load_path": str(tmp_path / "hf")}}
    copy = Transformer(model.config)
    load_weights(copy, tmp_path / "hf")
    assert_same_bits(copy, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_import_of_an_export_is_the_same_model(model: Transformer, tmp_path: Path, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    result = import_folder(exported(model, tmp_path / "hf"), tmp_path / "checkpoint")
    assert result["dtype"] == read_description(tmp_path / "checkpoint").precision == str(dtype)[6:]
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    again = load_model(tmp_path / "checkpoint", dtype=dtype)
    assert again.config == model.config
    assert_same_bits(again, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_of_an_import_is_the_same_folder(
    model: Transformer, tokenizer: Path, tmp_path: Path, dtype: str
) -> None:
    model = model.to(getattr(torch, dtype))
    first = exported(model, tmp_path / "first", tokenizer, eos_id=256)
    (first / "config.json").write_text(json.dumps(read_config(first) | {"eos_token_id": 60}))
    import_folder(first, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "second", dtype=dtype)
    assert (first / "model.safetensors").read_bytes() == (tmp_path / "second" / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (tmp_path / "second" / "tokenizer.json").read_bytes()
    assert read_config(first) == read_config(tmp_path / "second")


def test_published_tensors_without_the_prefix_and_with_masks(tmp_path: Path) -> None:
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "intermediate": 64, "vocab": 61, "learned_positions": 32}
    model = Transformer(ModelConfig(family="gpt2", **sizes))
    initialize(model, seed=0, std=0.3)
    hf = exported(model, tmp_path / "hf")
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(hf / "model.safetensors").items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    save_file(tensors | masks, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps(read_config(hf) | {"attn_pdrop": 0.1, "n_inner": None}))
    copy = Transformer(model.config)
    load_weights(copy, hf)
    assert_same_bits(copy, model)
    assert import_folder(hf, tmp_path / "checkpoint")["context"] == 32
    save_file(tensors | {"h.0.attn.mask": torch.ones(1)}, hf / "model.safetensors")
    with pytest.raises(UserError, match=r"holds the tensor h.0.attn.mask .* does not have"):
        load_weights(copy, hf)


def test_context_tokenizer_and_end_of_text_come_along(dense: Transformer, tokenizer: Path, tmp_path: Path) -> None:
    hf = exported(dense, tmp_path / "hf", tokenizer, eos_id=256)
    (hf / "config.json").write_text(json.dumps(read_config(hf) | {"eos_token_id": [5, 6]}))
    result = import_folder(hf, tmp_path / "checkpoint")
    about = read_description(find_checkpoint(tmp_path / "checkpoint"))
    assert (result["context"], result["eos_id"], result["tokenizer"]) == (64, 5, True)
    assert (about.context, about.eos_id) == (64, 5)
    assert about.tokenizer is not None
    assert about.tokenizer.read_bytes() == tokenizer.read_bytes()


def test_end_of_text_outside_the_vocabulary_is_none(dense: Transformer, tmp_path: Path) -> None:
    hf = exported(dense, tmp_path / "hf", eos_id=50279)
    assert import_folder(hf, tmp_path / "checkpoint")["eos_id"] is None


def test_half_precision_is_widened_exactly(dense: Transformer, tmp_path: Path) -> None:
    dense = dense.half()
    import_folder(exported(dense, tmp_path / "hf"), tmp_path / "checkpoint")
    assert_same_bits(load_model(tmp_path / "checkpoint"), dense.float())


@pytest.mark.parametrize("model", ["olmo-tied", "olmoe-tied"], indirect=True)
def test_tied_folder_may_repeat_the_embedding_as_head(model: Transformer, tmp_path: Path) -> None:
    hf = exported(model, tmp_path / "hf")
    tensors = load_file(hf / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, hf / "model.safetensors")
    copy = Transformer(model.config)
    load_weights(copy, hf)
    assert_same_bits(copy, model)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, hf / "model.safetensors")
    with pytest.raises(UserError, match=r"holds the tensor lm_head.weight \(and 0 more\)"):
        load_weights(copy, hf)


def test_folder_without_weights_gives_the_architecture_alone(moe: Transformer, tmp_path: Path) -> None:
    hf = exported(moe, tmp_path / "hf")
    (hf / "model.safetensors").unlink()
    assert read_model_folder(hf) == {"model": moe.config.model_dump(exclude_none=True)}
    with pytest.raises(UserError, match=r"holds no weights: neither model.safetensors nor"):
        import_folder(hf, tmp_path / "checkpoint")


def test_pickled_weights_are_refused_with_the_cure(moe: Transformer, tmp_path: Path) -> None:
    hf = exported(moe, tmp_path / "hf")
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    for act in (read_model_folder, lambda path: load_weights(moe, path)):
        with pytest.raises(
            UserError, match=r"pytorch_model.bin holds pickled weights.*as safetensors.*save_pretrained"
        ):
            act(hf)


def drop(tensors: dict) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def add(tensors: dict) -> None:
    tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(16, 16)


def reshape(tensors: dict) -> None:
    tensors["model.layers.0.mlp.experts.4.up_proj.weight"] = torch.zeros(12, 15)


def widen(tensors: dict) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()


def quantise(tensors: dict) -> None:
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(16, 16, dtype=torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, r"lacks the tensor model.layers.1.self_attn.k_proj.weight \(and 0 more\)"),
        (add, r"model.safetensors holds the tensor model.layers.2.self_attn.k_proj.weight \(and 0 more\)"),
        (reshape, r"model.safetensors: model.layers.0.mlp.experts.4.up_proj.weight has shape \[12, 15\].*\[12, 16\]"),
        (widen, r"model.safetensors: model.norm.weight is torch.float64, which .* would round"),
        (quantise, r"model.safetensors: model.layers.0.self_attn.o_proj.weight has type I8"),
    ],
)
def test_wrong_tensors_are_named_and_nothing_is_filled(
    moe: Transformer, tmp_path: Path, damage: object, message: str
) -> None:
    hf = exported(moe, tmp_path / "hf")
    tensors = load_file(hf / "model.safetensors")
    damage(tensors)
    save_file(tensors, hf / "model.safetensors")
    copy = Transformer(moe.config)
    torch.nn.init.zeros_(copy.embedding.weight)
    with pytest.raises(UserError, match=message):
        load_weights(copy, hf)
    assert (copy.embedding.weight == 0).all()
    with pytest.raises(UserError, match=message):
        import_folder(hf, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_rounding_into_a_narrow_model_is_refused(dense: Transformer, tmp_path: Path) -> None:
    hf = exported(dense, tmp_path / "hf")
    with pytest.raises(UserError, match=r"is torch.float32, which a model in torch.bfloat16 would round"):
        load_weights(Transformer(dense.config).to(torch.bfloat16), hf)


def test_truncated_file_is_named(dense: Transformer, tmp_path: Path) -> None:
    hf = exported(dense, tmp_path / "hf")
    file = hf / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors is missing or damaged"):
        load_weights(dense, hf)


def test_missing_shard_and_damaged_index_are_named(dense: Transformer, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    export_model(dense, hf, context=64, tokenizer=None, eos_id=None, max_file_bytes=5000)
    second = sorted(hf.glob("model-*.safetensors"))[1]
    second.unlink()
    with pytest.raises(UserError, match=f"{second.name} is missing or damaged"):
        load_weights(dense, hf)
    (hf / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match=r"model.safetensors.index.json is damaged"):
        load_weights(dense, hf)


def test_an_index_names_files_of_its_folder_only(dense: Transformer, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    export_model(dense, hf, context=64, tokenizer=None, eos_id=None, max_file_bytes=5000)
    index, first = hf / "model.safetensors.index.json", min(hf.glob("model-*.safetensors"))
    index.write_text(index.read_text().replace(f'"{first.name}"', f'"../{first.name}"'))
    first.rename(tmp_path / first.name)
    with pytest.raises(
        UserError, match=r"model.safetensors.index.json is damaged .*'\.\./.*' is not a plain file name"
    ):
        load_weights(dense, hf)


@pytest.mark.parametrize("size", [1 << 26, (1 << 31) - 1])
@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size"])
def test_a_model_of_many_times_the_weights_is_not_made(dense: Transformer, tmp_path: Path, key: str, size: int) -> None:
    hf = exported(dense, tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {key: size}))
    with pytest.raises(UserError, match="describes a model with many times the parameters"):
        import_folder(hf, tmp_path / "imported")


def test_weights_of_another_model_are_refused(dense: Transformer, tmp_path: Path) -> None:
    hf = exported(dense, tmp_path / "hf")
    other = Transformer(dense.config.model_copy(update={"heads": 1}))  # all tensors have equal shapes
    with pytest.raises(UserError, match=r"is of another model: heads is 2 there and 1 here"):
        load_weights(other, hf)


def test_a_width_that_no_layer_has_is_not_compared(tmp_path: Path) -> None:
    """Models with experts in every layer may still state a dense layer's width, which is not compared."""
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "intermediate": 24, "vocab": 61, "experts": 4}
    config = ModelConfig(family="qwen3_moe", experts_per_token=2, expert_intermediate=12, **sizes)
    sparse = Transformer(config)
    initialize(sparse, seed=0, std=0.1)
    hf = exported(sparse, tmp_path / "hf")
    load_weights(Transformer(sparse.config.model_copy(update={"intermediate": 12})), hf)
    with pytest.raises(UserError, match="expert_intermediate is 12 there and 8 here"):
        load_weights(Transformer(sparse.config.model_copy(update={"intermediate": 8, "expert_intermediate": 8})), hf)


def test_existing_checkpoint_is_not_overwritten(dense: Transformer, tmp_path: Path) -> None:
    hf = exported(dense, tmp_path / "hf")
    import_folder(hf, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="exists already"):
        import_folder(hf, tmp_path / "checkpoint")


def test_masks_that_are_not_the_models(tmp_path: Path) -> None:
    """A mask that does not fit the model is refused with one message, by the import and by a run that starts from the
    folder."""
    config = ModelConfig(family="olmo", hidden=16, layers=1, heads=2, intermediate=24, vocab=40)
    model = Transformer(config)
    initialize(model, 1, 0.02)
    name = "blocks.0.mlp.down.weight"
    weight = model.get_parameter(name)
    weight.data[:, :12] = 0
    mask = torch.tensor([0, 0b11110000, 255], dtype=torch.uint8).repeat(
        16, 1
    )  # one bit for each column, the first lowest
    path, file = exported(model, tmp_path / "hf"), tmp_path / "hf" / "masks.safetensors"
    for masks, message in (
        ({f"mask.{name}": mask[:4]}, rf"mask\.{name} of shape \(4, 3\) does not fit .* of shape \(16, 24\)"),
        ({f"mask.{name}": mask[0]}, r"of shape \(3,\)"),
        (
            {"mask.blocks.7.weight": mask},
            r"mask\.blocks\.7\.weight of shape \(16, 3\) belongs to no parameter",
        ),
        ({name: mask}, f"{name} of type uint8 is not a mask that `optimus export` wrote"),
        ({f"mask.{name}": mask.float()}, rf"mask\.{name} of type float32 is not a mask"),
        (None, "masks.safetensors is damaged"),
        ({f"mask.{name}": ~mask}, rf"mask\.{name} prunes weights that are not zero"),
    ):
        if masks is None:
            file.write_bytes(b"no tensors")
        else:
            save_file(masks, file)
        with pytest.raises(UserError, match=message):
            import_folder(path, tmp_path / "imported")
        assert not (tmp_path / "imported").exists()
        if "not zero" not in message:  # seen only when weights are read
            with pytest.raises(UserError, match=message):
                FolderReader(path, config)
    for fitting in (mask, torch.cat([torch.zeros(16, 12), torch.ones(16, 12)], 1).to(torch.uint8)):  # bits or bytes
        save_file({f"mask.{name}": fitting}, file)
        assert FolderReader(path, config).unpruned == 0.5
    import_folder(path, tmp_path / "imported")
    assert read_description(tmp_path / "imported").unpruned == 0.5
