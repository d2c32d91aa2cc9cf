"""Adapters are what `peft` loads: with the published model, they compute the logits of the trained model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import optimus
from helpers.families import SIZES, needed
from helpers.sweep import in_turns
from optimus import api
from optimus.cli import app
from optimus.model.families import families

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="needs peft (`make install-dev`)")

FIRST = ["llama", "gpt2", "olmo2"]  # factors of joined matrices, transposed weights, norms beside the projections
# PEFT 0.21 takes the shared experts of deepseek_v3 for its fused experts, whose factors it then does not find.
OTHERS = "deepseek_v3", "gpt_oss"
EXPORTED = [name for name, family in families().items() if family.architecture and name not in (*FIRST, *OTHERS)]


def run_of(name: str, data: Path, output: Path, **sections: Any) -> dict[str, Any]:
    sizes = {"steps": 2, "global_batch": 4, "micro_batch": 4, "sequence_length": 32, "precision": "float32"}
    return {
        "model": SIZES | needed(name) | {"family": name, "vocab": 320},
        "data": {"path": str(data)},
        "train": {"output": str(output), **sizes, **sections.pop("train", {})},
        "lr_schedule": {"lr": 3e-2, "warmup_steps": 0},
        "observe": {"tensorboard": False, "report": False},
        **sections,
    }


def factors(name: str, rank: int = 2) -> dict[str, Any]:
    """Returns the section `train`: projections are frozen; norms, biases and the output layer are trained."""
    sparse = ["expert", "router"] if "experts" in families()[name].fields else []
    return {"freeze": ["matrix", "embedding", *sparse], "lora_rank": rank}


def logits(model: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(tokens_BS).logits
    return found


@pytest.mark.parametrize("name", in_turns([*FIRST, *EXPORTED], 4, always=3))
def test_peft_computes_the_trained_model(name: str, prepared: Path, tmp_path: Path) -> None:
    """Norms and biases are trained too; they are the adapter's saved modules."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    optimus.train(run_of(name, prepared, tmp_path / "first"))
    optimus.export(tmp_path / "first", base)
    run = run_of(
        name,
        prepared,
        tmp_path / "run",
        train=factors(name),
        checkpoint={"load_path": str(base)},
    )
    optimus.train(run)
    made = api.export_adapter(tmp_path / "run", adapter)
    assert made["rank"] == 2
    assert sorted(file.name for file in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    optimus.export(tmp_path / "run", tmp_path / "whole")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens_BS = torch.randint(1, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    published = load(base, dtype=torch.float32)
    before = logits(published, tokens_BS)
    expected = logits(load(tmp_path / "whole", dtype=torch.float32), tokens_BS)
    adapted = peft.PeftModel.from_pretrained(load(base, dtype=torch.float32), adapter)
    found = logits(adapted, tokens_BS)
    changed = float((expected - before).norm() / before.norm())
    assert changed > 1e-3
    assert float((found - expected).norm() / expected.norm()) < 1e-3 * changed + 1e-5
    merged = logits(adapted.merge_and_unload(), tokens_BS)
    assert float((merged - expected).norm() / expected.norm()) < 1e-3 * changed + 1e-5


def test_what_is_no_adapter_is_named(prepared: Path, tmp_path: Path) -> None:
    plain = run_of("llama", prepared, tmp_path / "plain")
    optimus.train(plain)
    with pytest.raises(optimus.UserError, match=r"has no low-rank factors: .*a run with train.lora_rank"):
        api.export_adapter(tmp_path / "plain", tmp_path / "adapter")
    pruned = run_of(
        "llama",
        prepared,
        tmp_path / "pruned",
        train=factors("llama"),
        checkpoint={"load_path": str(tmp_path / "sparse")},
    )
    optimus.train(run_of("llama", prepared, tmp_path / "sparse", pruning={"sparsity": 0.5, "at": 0}))
    optimus.train(pruned)
    with pytest.raises(optimus.UserError, match=r"is pruned \(.* has zeros\), and PEFT would fill the zeros"):
        api.export_adapter(tmp_path / "pruned", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", {"freeze": ["matrix"]}, "trains the embedding, which is also the output layer"),
        ("olmoe", {"freeze": ["matrix", "embedding", "router"]}, "trains the experts blocks.0.moe.experts.down"),
        ("llama", {}, "does not say from which published model its training started"),
    ],
)
def test_what_peft_would_leave_out_is_refused(
    name: str, change: dict[str, Any], message: str, prepared: Path, tmp_path: Path
) -> None:
    tied = {"tie_embeddings": True} if name == "gpt2" else {}
    run = run_of(name, prepared, tmp_path / "run", train=factors(name) | change)
    run["model"] |= tied
    optimus.train(run)
    with pytest.raises(optimus.UserError, match=message):
        api.export_adapter(tmp_path / "run", tmp_path / "adapter")


def test_parameters_around_adapted_matrices_are_refused(prepared: Path, tmp_path: Path) -> None:
    """The attention sinks of GPT-OSS belong to the module that contains the projections."""
    optimus.train(run_of("gpt_oss", prepared, tmp_path / "run", train=factors("gpt_oss")))
    with pytest.raises(
        optimus.UserError, match=r"trains parameters of model.layers.0.self_attn itself, .*train.freeze"
    ):
        api.export_adapter(tmp_path / "run", tmp_path / "adapter", "a-base")


def test_the_command(prepared: Path, tmp_path: Path) -> None:
    optimus.train(run_of("llama", prepared, tmp_path / "run", train=factors("llama")))
    words = ["export", str(tmp_path / "run"), "--output", str(tmp_path / "adapter")]
    for more, message in (
        (["--base", "x"], "--base applies to --adapter only"),
        (["--adapter", "--base", "x", "--dtype", "bfloat16"], "--dtype: an adapter has the type of its factors"),
    ):
        with pytest.raises(optimus.UserError, match=message):
            CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
    made = CliRunner().invoke(app, [*words, "--adapter", "--base", "x", "--json"], catch_exceptions=False)
    assert json.loads(made.output)["base"] == "x"


def test_the_base_is_named(prepared: Path, tmp_path: Path) -> None:
    optimus.train(run_of("llama", prepared, tmp_path / "run", train=factors("llama", 4)))
    made = api.export_adapter(tmp_path / "run", tmp_path / "adapter", "an-organisation/a-model")
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert made["base"] == raw["base_model_name_or_path"] == "an-organisation/a-model"
    assert raw["r"] == raw["lora_alpha"] == 4
    with pytest.raises(optimus.UserError, match="exists already"):
        api.export_adapter(tmp_path / "run", tmp_path / "adapter")
