"""Low-rank factors of adapted models: equal on all layouts, added to the weight by what reads a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import optimus
from helpers.adapted import config_json, config_of
from helpers.sweep import in_turns
from optimus.errors import UserError
from optimus.testing.ranks import run_ranks
from optimus.testing.steps import Steps

FROZEN = ["matrix", "embedding", "head", "vector"]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"state": {"shard": "parameters"}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "zero-bubble": (2, {"parallel": {"pipeline": 2, "schedule": "zb-h1"}}),
    "tensor x pipeline x recompute": (4, {"parallel": {"tensor": 2, "pipeline": 2}, "recompute": ["block"]}),
}


def trained(family: str, sections: dict[str, Any]) -> list[tuple[float, float]]:
    experts = ["expert"] if "moe" in family else []
    steps = Steps(config_of(family, train={"lora_rank": 4, "freeze": FROZEN + experts}, **sections))
    return [(float(result.loss), float(result.grad_norm)) for result in (steps.train() for _ in range(4))]


@pytest.mark.parametrize(
    ("family", "layout"),
    in_turns(
        [
            ("llama", "tensor"),
            ("llama", "zero-bubble"),
            ("olmo2", "tensor x pipeline x recompute"),
            ("granitemoe", "zero3"),
        ],
        3,
        always=1,
    ),
)
def test_layouts_equal_one_process(family: str, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    expected = trained(family, {})
    assert min(norm for _, norm in expected) > 0
    for (loss, norm), (expected_loss, expected_norm) in zip(run_ranks(trained, ranks, family, sections)[0], expected):
        assert loss == pytest.approx(expected_loss, rel=2e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.in_turn(1, 3)
def test_a_run_resumes_and_exports_the_sum(small_run: dict[str, Any], tmp_path: Path) -> None:
    train = small_run["train"] | {"precision": "float32", "lora_rank": 2, "freeze": ["matrix", "embedding", "head"]}
    raw = config_json("llama") | {"max_position_embeddings": 64}
    run = small_run | {"model": {"transformers": raw}, "train": train, "checkpoint": {"every": 2}}
    optimus.train(run)
    again = tmp_path / "again"
    optimus.train(run, [f"train.output={again}", "train.stop_at=2"])
    optimus.train(run, [f"train.output={again}"], ranks=2, resume=True)
    model = optimus.load_model(train["output"])
    for name, tensor in optimus.load_model(again).named_parameters():
        torch.testing.assert_close(tensor, model.get_parameter(name), rtol=0, atol=1e-5, msg=name)
    made = optimus.export(train["output"], tmp_path / "exported")
    tokens_BS = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens_BS), AutoModelForCausalLM.from_pretrained(made["output"])(tokens_BS).logits)


def test_transposed_weights_have_no_factors() -> None:
    """GPT-2's layers have weights [inputs, outputs]."""
    with pytest.raises(UserError, match=r"frozen projections, such as .*, whose weights are transposed or in pieces"):
        Steps(config_of("gpt2", train={"lora_rank": 2, "freeze": ["matrix"]}))


def test_weights_in_pieces_have_no_factors_and_a_note_says_so() -> None:
    """Phi-3 stores query, key and value of different sizes in pieces."""
    steps = Steps(config_of("phi3", train={"lora_rank": 2, "freeze": ["matrix"]}))
    (note,) = steps.resolved.model.notes
    assert note.startswith("train.lora_rank: no factors for 4 frozen projections, such as model.layers.0.self_attn.qkv")
