"""Runs of models of `transformers`: from a folder to checkpoints, evaluation, generation and back to a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import optimus
from helpers.adapted import config_json
from optimus.config import load_config
from optimus.errors import UserError
from optimus.evaluation.generation import Request, generation
from optimus.hub import read_model_folder

SHARDED = ["state.shard=parameters"]


@pytest.fixture
def run(small_run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The configuration of a run of a Phi-3 whose config.json is in a folder."""
    folder = tmp_path / "author"
    folder.mkdir()
    raw = config_json("phi3") | {"max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    train = small_run["train"] | {"precision": "float32"}
    return small_run | {"model": {"transformers": str(folder)}, "train": train, "checkpoint": {"every": 2}}


def losses(folder: str | Path) -> list[float]:
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def weights(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    return dict(optimus.load_model(checkpoint).named_parameters())


def test_a_stopped_run_goes_on_bit_for_bit_and_on_another_layout(run: dict[str, Any], tmp_path: Path) -> None:
    optimus.train(run)
    expected = weights(run["train"]["output"])
    for name, ranks, layout, tolerance in (
        ("same", 1, [], 0.0),
        ("sharded", 2, SHARDED, 1e-5),
        ("pipeline", 2, ["parallel.pipeline=2"], 1e-5),
        ("tensor", 2, ["parallel.tensor=2"], 1e-5),
    ):
        output = [f"train.output={tmp_path / name}"]
        optimus.train(run, [*output, "train.stop_at=4"])
        optimus.train(run, [*output, *layout], ranks=ranks, resume=True)
        for parameter, tensor in weights(tmp_path / name).items():
            torch.testing.assert_close(tensor, expected[parameter], rtol=0, atol=tolerance, msg=f"{name}: {parameter}")


def test_numbers_as_keys_are_those_of_the_checkpoint(run: dict[str, Any]) -> None:
    labels = {"transformers": config_json("phi3") | {"id2label": {0: "no", 1: "yes"}}}  # a checkpoint has them as text
    optimus.train(run | {"model": labels}, ["train.stop_at=2"])
    assert optimus.train(run | {"model": labels}, ["train.steps=6"], resume=True)["step"] == 6


def test_from_training_to_a_folder_and_back(run: dict[str, Any], tmp_path: Path) -> None:
    output = run["train"]["output"]
    optimus.train(run)
    text = tmp_path / "held.txt"
    text.write_text("def held(out): return out\n" * 20, encoding="utf-8")
    assert 0 < optimus.evaluate(output, text=text)["bits_per_byte"] < 20
    made = optimus.export(output, tmp_path / "exported")
    model, author = optimus.load_model(output), AutoModelForCausalLM.from_pretrained(made["output"])
    tokens_BS = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens_BS), author(tokens_BS).logits)

    prompt = [5, 6, 7, 8, 20, 31]
    continued = [token for _, token in generation(model, [Request(prompt, 8), Request(prompt[:3], 8)])]
    alone = [
        author.generate(torch.tensor([each]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(each) :]
        for each in (prompt, prompt[:3])
    ]
    assert sorted(continued) == sorted(torch.cat(alone).tolist())
    assert isinstance(optimus.generate(output, "def ", max_tokens=4), str)

    again = run | {"model": {"transformers": made["output"]}}
    optimus.train(again, [f"train.output={tmp_path / 'again'}", "train.steps=1"])
    config = load_config(again, ["train.steps=1"], read_model_folder)
    assert config.checkpoint.load_path == made["output"]
    assert losses(tmp_path / "again")[0] == pytest.approx(losses(output)[-1], abs=0.2)  # not that of fresh weights


def test_a_preset_trains_with_the_modules_of_transformers(run: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 320}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    changed = [f"model.transformers.{name}={size}" for name, size in sizes.items()]
    optimus.train(run | {"model": {"transformers": "qwen3-0.6b"}}, [*changed, "train.steps=2"])
    assert len(losses(run["train"]["output"])) == 2


@pytest.mark.parametrize(
    ("keys", "overrides", "message"),
    [
        ({}, ["parallel.sequence=true", "parallel.tensor=2"], "parallel.sequence: the modules of `transformers` take"),
        ({}, ["parallel.tensor=[1,2]"], "parallel.tensor: the residual stream of a model of `transformers`"),
        ({}, ["parallel.tensor=3"], "is not a multiple of parallel.tensor 3"),
        ({}, ["parallel.vocabulary=true", "parallel.pipeline=2"], "parallel.vocabulary: a model of `transformers`"),
        ({}, ["recompute=norm"], "recompute: a model of `transformers` recomputes whole blocks only"),
        ({}, ["recompute=block", "recompute_every=2"], "recompute_every: .* block by block"),
        (
            {},
            ["train.lora_rank=4", "train.freeze=[matrix]"],
            "train.lora_rank: low-rank factors need the library's own",
        ),
        ({}, ["parallel.expert=2"], "parallel.expert 2: the model is dense"),
        ({"resid_pdrop": 0.1}, [], r"model.transformers: .*resid_pdrop: 0.1\): set it to 0"),
        ({"auto_map": {"AutoModel": "x.Y"}}, [], "auto_map names code outside of `transformers`, which is never run"),
        ({"model_type": "phi-unknown"}, [], "model.transformers: "),
        ({"num_attention_heads": "four"}, [], "model.transformers: .*num_attention_heads"),
    ],
)
def test_what_cannot_be_is_refused(
    run: dict[str, Any], tmp_path: Path, keys: dict[str, Any], overrides: list[str], message: str
) -> None:
    file = Path(run["model"]["transformers"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | keys), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        optimus.train(run, overrides, ranks=None)
    assert not (tmp_path / "run").exists()


def test_documents_that_leak_are_refused(run: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"data.documents: .*states of one document reach the next one in mamba"):
        optimus.train(run | {"model": {"transformers": config_json("falcon_h1")}}, ["data.documents=mask"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "'nowhere' is neither a folder with a config.json, nor such a file, nor a preset"),
        ("{}", "has no model_type"),
        ("{", "cannot be read"),
    ],
)
def test_a_bad_source_is_named(run: dict[str, Any], tmp_path: Path, source: str, message: str) -> None:
    if source != "nowhere":
        (tmp_path / "config.json").write_text(source, encoding="utf-8")
        source = str(tmp_path / "config.json")
    with pytest.raises(UserError, match=message):
        optimus.train(run | {"model": {"transformers": source}})
