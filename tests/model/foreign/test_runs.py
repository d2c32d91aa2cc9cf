"""Runs of models of `transformers`: from a folder to checkpoints, evaluation, generation and back to a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import optimus
from helpers.adapted import config_json, config_of
from helpers.model_facts import configuration
from helpers.sweep import in_turns
from optimus.config import load_config
from optimus.errors import UserError
from optimus.evaluation.generation import Request, generation
from optimus.hub import read_model_folder
from optimus.hub.config_json import context_of
from optimus.hub.foreign import read_weights
from optimus.model.build import causal_model
from optimus.model.foreign.twin import small
from optimus.model.init import initialize
from optimus.testing.steps import Steps

SHARDED = ["state.shard=parameters"]


@pytest.fixture
def run(small_run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The configuration of a run of a Phi-3 whose config.json is in a folder."""
    folder = tmp_path / "author"
    folder.mkdir()
    raw = config_json("phi3") | {"max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    train = small_run["train"] | {"precision": "float32"}
    # A layout changes a gradient g by rounding alone, some 1e-8. AdamW's g / (|g| + eps) turns that into a share of the
    # learning rate where |g| is as small; with this eps the change in six steps is at most 6 * 3e-3 * 2e-8 / 1e-4 < 1e-5.
    adamw = {"eps": 1e-4}
    return small_run | {
        "model": {"transformers": str(folder)}, "train": train, "optimizer": adamw, "checkpoint": {"every": 2}
    }  # fmt: skip


def losses(folder: str | Path) -> list[float]:
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def weights(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    return dict(optimus.load_model(checkpoint).named_parameters())


@pytest.mark.in_turn(0, 4)
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


@pytest.mark.in_turn(1, 2)
def test_experts_move_between_ranks_when_a_run_resumes(run: dict[str, Any], tmp_path: Path) -> None:
    """Experts on two ranks become experts of one rank, with sharded state, and parts of experts."""
    run = run | {"model": {"transformers": config_json("qwen3_moe")}}
    optimus.train(run)
    expected = weights(run["train"]["output"])
    for name, layout in (("sharded", [*SHARDED, "parallel.expert=2"]), ("tensor", ["parallel.tensor=2"])):
        output = [f"train.output={tmp_path / name}"]
        optimus.train(run, [*output, "parallel.expert=2", "train.stop_at=3"], ranks=2)
        optimus.train(run, [*output, *layout], ranks=2, resume=True)
        for parameter, tensor in weights(tmp_path / name).items():
            torch.testing.assert_close(tensor, expected[parameter], rtol=0, atol=1e-5, msg=f"{name}: {parameter}")
    made = optimus.export(tmp_path / "sharded", tmp_path / "exported")
    model, author = (
        optimus.load_model(tmp_path / "sharded"),
        AutoModelForCausalLM.from_pretrained(made["output"], experts_implementation="eager"),
    )
    tokens_BS = torch.arange(24).view(2, 12)
    torch.testing.assert_close(model(tokens_BS), author(tokens_BS).logits, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("family", in_turns(["bert", "camembert"], 2))
def test_tied_tensors_are_written_and_read_again(family: str, run: dict[str, Any], tmp_path: Path) -> None:
    """BERT's bias of the output layer has two names; Camembert's output layer is registered before its embedding."""
    raw = config_json(family) | {"max_position_embeddings": 66}
    output = run["train"]["output"]
    optimus.train(run | {"model": {"transformers": raw}}, ["train.steps=1"])
    made = optimus.export(output, tmp_path / "exported")
    model, author = optimus.load_model(output), AutoModelForCausalLM.from_pretrained(made["output"])
    tokens_BS = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens_BS), author(tokens_BS).logits)
    bias = next(
        tensor for name, tensor in author.named_parameters() if name.endswith(("predictions.bias", "lm_head.bias"))
    )
    assert bool(bias.any())
    again = run | {"model": {"transformers": made["output"]}}
    optimus.train(
        again, [f"train.output={tmp_path / 'again'}", "train.steps=1", "lr_schedule.lr=1e-12", "lr_schedule.min_lr=0"]
    )
    found = weights(tmp_path / "again")
    for name, tensor in weights(output).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_wider_weights_than_the_model_are_refused(run: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(run["model"]["transformers"])
    author = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).double()
    author.save_pretrained(folder)
    with pytest.raises(UserError, match=r"is torch.float64, which a model in torch.float32 would round: use a wider"):
        optimus.train(run)


def test_weights_are_read_exactly_whatever_the_dtype_in_config_json(run: dict[str, Any]) -> None:
    folder = Path(run["model"]["transformers"])
    author = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    author.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    found = read_weights(folder, load_config(run, (), read_model_folder).model)  # type: ignore[arg-type]
    assert all(torch.equal(found[name], tensor) for name, tensor in author.named_parameters())


@pytest.mark.parametrize(
    ("family", "name"),
    in_turns([("afmoe", "mlp.expert_bias"), ("ernie4_5_moe", "gate.moe_statics.e_score_correction_bias")], 2, always=1),
)
def test_parameters_without_gradients_stay_as_they_are(family: str, name: str) -> None:
    steps = Steps(config_of(family))
    before = {each: tensor.clone() for each, tensor in steps.model.named_parameters()}
    frozen = {each for each in before if each.endswith(name)}
    assert frozen
    steps.train()
    steps.train()
    assert {each for each, tensor in steps.model.named_parameters() if torch.equal(tensor, before[each])} >= frozen
    assert any("get no gradient and stay frozen" in note for note in causal_model(config_of(family).model).notes)


@pytest.mark.in_turn(2, 3)
def test_infinities_of_a_folder_are_read_and_written(run: dict[str, Any], tmp_path: Path) -> None:
    """`transformers` writes the infinity among the settings of Nemotron-H as a mapping."""
    folder = tmp_path / "nemotron"
    author = AutoModelForCausalLM.from_config(small(configuration("nemotron_h")))
    author.save_pretrained(folder)
    assert "__float__" in (folder / "config.json").read_text(encoding="utf-8")
    optimus.train(run | {"model": {"transformers": str(folder)}}, ["train.steps=1"])
    made = optimus.export(run["train"]["output"], tmp_path / "exported")
    assert AutoConfig.from_pretrained(made["output"]).time_step_limit[1] == float("inf")


def test_a_folder_that_states_no_length(run: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "bloom"
    AutoModelForCausalLM.from_config(small(configuration("bloom"))).save_pretrained(folder)
    assert context_of(folder, own_modules=True) == 1
    optimus.train(run | {"model": {"transformers": str(folder)}}, ["train.steps=1"])
    assert isinstance(optimus.generate(run["train"]["output"], "def ", max_tokens=4), str)


def test_a_model_whose_cache_is_not_taken_generates_too() -> None:
    """Mamba's forward pass takes no `past_key_values`."""
    model = causal_model(config_of("mamba").model)
    initialize(model, 0, 0.02)
    author = AutoModelForCausalLM.from_config(small(configuration("mamba"))).eval()
    with torch.no_grad():
        for name, parameter in author.named_parameters():
            parameter.copy_(model.author_tensors()[name])
    prompt = [5, 6, 7, 8, 20, 31]
    found = [token for _, token in generation(model.eval(), [Request(prompt, 8)])]
    made = author.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found == made[0, len(prompt) :].tolist()


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
        ({}, ["recompute=moe"], "recompute: the experts of a model of `transformers` recompute with the rest"),
        ({}, ["recompute=block", "recompute_every=2"], "recompute_every: .* block by block"),
        ({}, ["parallel.expert=2"], "parallel.expert 2: the model is dense"),
        ({"resid_pdrop": 0.1}, [], r"model.transformers: .*resid_pdrop: 0.1\): set it to 0"),
        ({}, ["model.layers=2"], "'layers' is beside transformers, which has no further keys: remove it"),
        (
            {"auto_map": {"AutoModel": "x.Y"}},
            [],
            "auto_map names code .*: set model.trust_remote_code to true, which runs",
        ),
        (
            {"model_type": "phi-unknown"},
            [],
            "model.transformers: model_type is 'phi-unknown', which `transformers` does not have: choose another model, or",
        ),
        ({"model_type": "t5"}, [], "no causal language model of model_type 't5': choose another model$"),
        ({"hidden_size": 0}, [], "model.transformers: hidden_size is 0: it must be 1 or more"),
        ({"vocab_size": -4}, [], "model.transformers: vocab_size is -4: it must be 1 or more"),
        ({"vocab_size": "many"}, [], "model.transformers: .*'vocab_size'.*change it in the configuration"),
        ({"num_key_value_heads": 0}, [], "model.transformers: num_key_value_heads is 0: it must be 1 or more"),
        ({"num_key_value_heads": 3}, [], "num_attention_heads 4 is not a multiple of num_key_value_heads 3: change"),
        ({"sliding_window": 0}, [], "model.transformers: sliding_window is 0: it must be 1 or more, or null"),
        ({"hidden_act": "gelux"}, [], r"Phi3Config: no model can be built \(KeyError: 'gelux'\): check hidden_act"),
        ({"pad_token_id": 999}, [], "Phi3Config: .*: pad_token_id is 999, which must be below vocab_size 321"),
        ({"intermediate_size": -4}, [], "Phi3Config: no model can be built .*: check the sizes in its configuration"),
        ({"intermediate_size": 0}, [], "Phi3ForCausalLM does not run with small sizes .*: check the sizes"),
        ({"num_attention_heads": "four"}, [], "model.transformers: .*num_attention_heads"),
    ],
)
def test_what_cannot_be_is_refused(
    run: dict[str, Any], tmp_path: Path, keys: dict[str, Any], overrides: list[str], message: str
) -> None:
    file = Path(run["model"]["transformers"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | keys), encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        optimus.train(run, overrides, ranks=None)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_keys_beside_a_folder(run: dict[str, Any]) -> None:
    run["model"] = run["model"] | {"layers": 2}
    with pytest.raises(UserError, match="'layers' is beside transformers, which has no further keys"):
        optimus.train(run)


def test_an_empty_auto_map_names_no_code(run: dict[str, Any]) -> None:
    load_config(run | {"model": {"transformers": config_json("phi3") | {"auto_map": None}}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"moe": {"drop_duplicates": False}},
            "moe: the model has its author's experts and router: remove the section moe",
        ),
        (
            {"parallel": {"tensor": 4, "expert_tensor": 2}},
            "parallel.expert_tensor 2: parallel.tensor divides each expert: remove it",
        ),
    ],
)
def test_options_of_our_experts_for_a_model_with_its_own(
    run: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_config(run | {"model": {"transformers": config_json("qwen3_moe")}} | sections)


def test_documents_that_leak_are_refused(run: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"data.documents: .*states of one document reach the next one in mamba"):
        optimus.train(run | {"model": {"transformers": config_json("falcon_h1")}}, ["data.documents=mask"])


def test_sequences_longer_than_the_positions(run: dict[str, Any], tmp_path: Path) -> None:
    run["model"] = {"transformers": config_json("gpt2") | {"n_positions": 32}}
    message = r"train.sequence_length 33 is more than model.transformers.n_positions 32: lower it"
    with pytest.raises(UserError, match=message):
        load_config(run, ["train.sequence_length=33"])
    model = causal_model(load_config(run).model).eval()
    tokens_BS = torch.zeros(1, 33, dtype=torch.long)
    for use in (model, model.losses):
        with pytest.raises(UserError, match="has 33 tokens, but the model has only 32 learned positions: shorten the"):
            use(tokens_BS)
    with pytest.raises(UserError, match="has 33 tokens, but the model has only 32 learned"):
        [*generation(model, [Request([1] * 30, 4)])]
    assert len([*generation(model, [Request([1] * 30, 3)])]) == 3


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
