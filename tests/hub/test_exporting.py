"""An export loads in `transformers` as the same model, and is written completely or not at all."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optimus.checkpoint.store import save_model
from optimus.errors import UserError
from optimus.hub import export_checkpoint, export_model, exporting, load_weights
from optimus.hub.exporting import new_folder
from optimus.model import Transformer
from optimus.model.families import families

transformers = pytest.importorskip("transformers")

TOKENS_BS = torch.arange(40).view(2, 20)


def bare(model: Transformer, output: Path, **options: object) -> dict:
    return export_model(model, output, **({"context": 64, "tokenizer": None, "eos_id": None} | options))


def test_transformers_loads_the_same_model(model: Transformer, tmp_path: Path) -> None:
    bare(model, tmp_path / "hf")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == families()[model.config.family].architecture
    assert theirs.dtype == torch.float32
    assert theirs.config.max_position_embeddings == 64
    with torch.no_grad():
        assert (theirs(TOKENS_BS).logits - model(TOKENS_BS)).abs().max() < 1e-5


def test_what_transformers_saves_again_is_the_same_bits(model: Transformer, tmp_path: Path) -> None:
    bare(model, tmp_path / "ours")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    if model.config.tie_embeddings and families()[model.config.family].head_copy:
        assert torch.equal(ours.pop("lm_head.weight"), ours["model.embed_tokens.weight"])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("model", ["olmo-tied", "olmoe-tied"], indirect=True)
def test_families_that_servers_do_not_tie_have_the_head_too(model: Transformer, tmp_path: Path) -> None:
    copied = model.config.family == "olmoe"
    bare(model, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert ("lm_head.weight" in tensors) == copied
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    load_weights(Transformer(model.config), tmp_path / "hf")


def test_bfloat16_rounds_once(model: Transformer, tmp_path: Path) -> None:
    result = bare(model, tmp_path / "hf", dtype=torch.bfloat16)
    assert result["dtype"] == "bfloat16"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    embedding = theirs.get_input_embeddings().weight
    assert torch.equal(embedding, model.embedding.weight.to(torch.bfloat16))


def test_shards_have_an_index_and_load(moe: Transformer, tmp_path: Path) -> None:
    whole = bare(moe, tmp_path / "whole")
    cut = bare(moe, tmp_path / "cut", max_file_bytes=6000)
    shards = sorted((tmp_path / "cut").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(shard.stat().st_size < 6000 + 2000 for shard in shards)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * whole["parameters"]
    assert len(index["weight_map"]) == whole["tensors"] == cut["tensors"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    with torch.no_grad():
        assert (theirs(TOKENS_BS).logits - moe(TOKENS_BS)).abs().max() < 1e-5
    copy = Transformer(moe.config)
    load_weights(copy, tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(copy.parameters(), moe.parameters(), strict=True))


def test_result_states_files_and_sizes(moe: Transformer, tokenizer: Path, tmp_path: Path) -> None:
    result = bare(moe, tmp_path / "hf", tokenizer=tokenizer, eos_id=256)
    assert result["output"] == str(tmp_path / "hf")
    assert result["files"] == {file.name: file.stat().st_size for file in (tmp_path / "hf").iterdir()}
    assert result["bytes"] == sum(result["files"].values())
    assert result["parameters"] == sum(p.numel() for p in moe.parameters())
    assert sorted(result["files"]) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_tokenizer_loads_and_encodes_the_same(dense: Transformer, tokenizer: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    bare(dense, tmp_path / "hf", tokenizer=tokenizer, eos_id=256)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), Tokenizer.from_file(str(tokenizer))
    assert (theirs.eos_token, theirs.eos_token_id, theirs.pad_token_id) == ("<|endoftext|>", 256, 256)
    assert theirs.model_max_length == 64
    for text in ("A first text.\n\tdef f(x):  return  x", "naïve 日本語 🙂 , . ' s", "a<|endoftext|> b"):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert config.eos_token_id == generation.eos_token_id == generation.pad_token_id == 256


def test_published_tokenizer_encodes_the_same(dense: Transformer, shared_data: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = shared_data / "tokenizers" / "allenai_gpt-neox-olmo-dolma-v1_5.json"
    ours = Tokenizer.from_file(str(path))
    bare(dense, tmp_path / "hf", tokenizer=path, eos_id=50279)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.eos_token_id, theirs.pad_token) == (50279, "<|padding|>")
    text = (shared_data / "corpus" / "tinyshakespeare.txt").read_text(encoding="utf-8")[
        :20_000
    ] + "  x = 1\n\n\t日本語 🙂"
    assert theirs(text)["input_ids"] == ours.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_of_a_checkpoint(moe: Transformer, tokenizer: Path, tmp_path: Path, dtype: str) -> None:
    save_model(moe, tmp_path / "checkpoint", context=32, tokenizer=tokenizer, eos_id=256)
    result = export_checkpoint(tmp_path / "checkpoint", tmp_path / "hf", dtype=dtype)
    assert result["dtype"] == dtype
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert torch.equal(theirs.lm_head.weight, moe.head.weight.to(getattr(torch, dtype)))
    assert theirs.config.max_position_embeddings == 32
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == 256


def test_folder_with_content_is_refused_and_untouched(dense: Transformer, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("precious")
    with pytest.raises(UserError, match="exists already: choose another output folder"):
        bare(dense, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_empty_folder_is_taken_and_left_over_parts_are_replaced(dense: Transformer, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / ".hf.partial").mkdir()
    (tmp_path / ".hf.partial" / "stale").write_text("x")
    result = bare(dense, tmp_path / "hf")
    assert "stale" not in result["files"]
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_folder_that_another_call_writes_stays(dense: Transformer, tmp_path: Path) -> None:
    with new_folder(tmp_path / "hf") as partial:
        (partial / "first").write_text("x")
        with pytest.raises(UserError, match=r"another process writes to .*\.hf\.partial: wait for its end"):
            bare(dense, tmp_path / "hf")
        assert [path.name for path in partial.iterdir()] == ["first"]
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["first"]


def test_failed_write_leaves_nothing(dense: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("optimus.hub.exporting.write_tensors", full)
    with pytest.raises(UserError, match=r"cannot write .*hf: No space left on device; make room"):
        bare(dense, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_that_vanishes_meanwhile(
    dense: Transformer, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export blames the output folder only for errors of the output folder."""
    file, read = tmp_path / "tokenizer.json", exporting._special_tokens
    shutil.copyfile(tokenizer, file)
    monkeypatch.setattr("optimus.hub.exporting._special_tokens", lambda *given: (read(*given), file.unlink())[0])
    with pytest.raises(UserError, match=r"^cannot read .*tokenizer\.json: No such file or directory$"):
        bare(dense, tmp_path / "hf", tokenizer=file, eos_id=256)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_said_before_writing(
    dense: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 0, 10))
    with pytest.raises(UserError, match=r"has 10 B free, but the weights take [\d.]+ kB"):
        bare(dense, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_architecture_without_equal_is_refused(tmp_path: Path) -> None:
    from optimus.config import ModelConfig

    model = Transformer(ModelConfig(family="olmo", hidden=8, layers=1, heads=1, intermediate=8, vocab=8, norm_eps=1e-6))
    with pytest.raises(UserError, match="norm_eps is 1e-06"):
        bare(model, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_end_of_text_must_be_in_the_tokenizer(dense: Transformer, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no token 999"):
        bare(dense, tmp_path / "hf", tokenizer=tokenizer, eos_id=999)


def test_unknown_dtype_is_named(dense: Transformer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`dtype` is 'bfloat': did you mean 'bfloat16'"):
        export_checkpoint(tmp_path, tmp_path / "hf", dtype="bfloat")
