"""Models of `transformers` that once had other numbers: buffers, layers of other classes, heads asked on every stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import optimus
from helpers.adapted import config_json, config_of, expected, on_layout
from helpers.sweep import in_turns
from optimus.model.build import causal_model
from optimus.model.parameters import stored_buffers
from optimus.observe.metrics import read_metrics
from optimus.testing.steps import Steps

LOSS, NORM = 2e-6, 1e-4  # as in test_layouts.py


@pytest.mark.parametrize(
    ("family", "layout"),
    in_turns(
        [
            ("falcon", "tensor"),  # its linear layers have a class of their own
            ("minimax", "zero3"),  # its decays are buffers that checkpoints store
            ("mamba", "1f1b"),  # it asks the output layer's weight for its type on every stage
            ("deepseek_v4", "pruning"),  # matrices of its indexers get no gradient, and are not pruned
        ],
        4,
    ),
)
def test_losses_are_those_of_a_plain_loop(family: str, layout: str) -> None:
    found = on_layout(family, layout)
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected(family, layout), strict=True):
        assert loss == pytest.approx(expected_loss, rel=LOSS)
        assert norm == pytest.approx(expected_norm, rel=NORM)


@pytest.mark.in_turn(0, 3)
def test_buffers_begin_with_the_values_of_the_model() -> None:
    steps = Steps(config_of("minimax"))
    expected = dict(stored_buffers(causal_model(steps.config.model)))
    assert any(buffer.any() for buffer in expected.values())
    for name, buffer in steps.state.buffers.items():
        torch.testing.assert_close(buffer, expected[name])


def test_a_folder_keeps_buffers(small_run: dict[str, Any], tmp_path: Path) -> None:
    """DeepSeek-V3's routers choose by a bias that is a buffer."""
    raw = config_json("deepseek_v3")
    made: Any = AutoModelForCausalLM.from_config(type_of(raw)).float().eval()
    with torch.no_grad():
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-1, 1, buffer.numel()))
    made.save_pretrained(tmp_path / "author")
    run = small_run | {"model": {"transformers": str(tmp_path / "author")}}
    run["train"] = small_run["train"] | {"steps": 1, "precision": "float32"}
    run["lr_schedule"] = {"lr": 1e-9, "min_lr": 0.0, "warmup_steps": 0}
    optimus.train(run)
    tokens_BS = torch.arange(20, 44).view(2, 12)
    expected = made(tokens_BS).logits
    torch.testing.assert_close(optimus.load_model(run["train"]["output"])(tokens_BS), expected, rtol=0, atol=1e-4)
    exported = optimus.export(run["train"]["output"], tmp_path / "exported")["output"]
    again = AutoModelForCausalLM.from_pretrained(exported)
    torch.testing.assert_close(again(tokens_BS).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.in_turn(0, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_a_pipeline_stores_the_buffers_of_a_block_once(small_run: dict[str, Any], tmp_path: Path) -> None:
    run = small_run | {"model": {"transformers": config_json("minimax")}, "checkpoint": {"every": 2}}
    run["train"] = small_run["train"] | {"steps": 3, "precision": "float32"}
    pipeline = [f"train.output={tmp_path / 'pipeline'}", "parallel.pipeline=2"]
    optimus.train(run)
    optimus.train(run, [*pipeline, "train.stop_at=2"], ranks=2)
    optimus.train(run, pipeline, ranks=2, resume=True)
    losses = [
        [record["loss"] for record in read_metrics(Path(folder))]
        for folder in (tmp_path / "run", tmp_path / "pipeline")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_share_the_stored_buffers(tied: bool) -> None:
    """Each buffer is in the checkpoint of one of two stages, wherever its module is."""
    config = config_of("llama", model={"transformers": config_json("llama") | {"tie_word_embeddings": tied}})
    found: list[str] = []
    for stage, blocks in enumerate((range(2), range(2, 4))):
        with torch.device("meta"):
            model: Any = causal_model(config.model)
        owners = [*model.modules()]
        for owner in owners:
            owner.register_buffer("statistic", torch.zeros(1))
        ends = {"first": stage == 0, "last": stage == 1, "head": stage == 1}
        model.keep(blocks, embedding=tied or stage == 0, **ends)
        found += [name for name, _ in stored_buffers(model) if name.endswith("statistic")]
    assert len(found) == len({*found}) == len(owners)


def type_of(raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**raw)
