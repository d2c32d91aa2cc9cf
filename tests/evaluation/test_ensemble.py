"""Ensembles equal their definition, for one member and for members of different widths; impossible ensembles are
refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import optimus
from optimus.checkpoint.store import save_model
from optimus.cli import app
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.evaluation.score import Window, score
from optimus.model import Transformer
from optimus.model.ensemble import Ensemble
from optimus.model.init import initialize


def model_of(hidden: int, vocab: int = 328) -> Transformer:
    config = ModelConfig(family="olmo", hidden=hidden, layers=2, heads=2, intermediate=24, vocab=vocab)
    model = Transformer(config)
    initialize(model, hidden, 0.3)
    return model.eval().requires_grad_(False)


@pytest.fixture
def members() -> list[Transformer]:
    """Two models of different widths."""
    return [model_of(16), model_of(24)]


def test_it_scores_the_mean_of_the_logits(members: list[Transformer]) -> None:
    tokens = torch.randint(0, 300, (12,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mean_SV = torch.stack([member.eval()(tokens[None])[0].float() for member in members]).mean(0)
    log_p = torch.log_softmax(mean_SV[4:-1], -1).gather(1, tokens[5:, None]).sum()
    (found,) = score(Ensemble(members), [Window(tokens[:5].tolist(), tokens[5:].tolist())])
    assert found.log_likelihood == pytest.approx(float(log_p), rel=1e-5)
    alone = [score(member, [Window(tokens[:5].tolist(), tokens[5:].tolist())])[0].log_likelihood for member in members]
    assert found.log_likelihood != pytest.approx(alone[0], rel=1e-3)


def test_one_model_twice_is_that_model(members: list[Transformer]) -> None:
    window = Window([1, 2], [3, 4, 5])
    (one,), (twice,) = score(members[0], [window]), score(Ensemble([members[0]] * 2), [window])
    assert twice.log_likelihood == pytest.approx(one.log_likelihood, rel=1e-6)


def test_checkpoints_are_evaluated_together(
    members: list[Transformer],
    tokenizer_file: Path,
    eos_id: int,
    tmp_path: Path,
) -> None:
    for name, member in zip("ab", members):
        save_model(member, tmp_path / name, context=48, tokenizer=tokenizer_file, eos_id=eos_id)
    found: dict[str, Any] = optimus.evaluate([tmp_path / "a", tmp_path / "b"], text=__file__, device="cpu")
    alone = [optimus.evaluate(tmp_path / name, text=__file__, device="cpu")["bits_per_byte"] for name in "ab"]
    # Mean logits give the normalised geometric mean of the probabilities, whose bits never exceed the mean of the
    # members' bits.
    assert math.isfinite(found["bits_per_byte"])
    assert found["bits_per_byte"] <= sum(alone) / 2 + 1e-6
    assert found["checkpoint"]["ensemble"] == [str(tmp_path / "a"), str(tmp_path / "b")]
    outcome = CliRunner().invoke(
        app, ["evaluate", str(tmp_path / "a"), str(tmp_path / "b"), "--ensemble", "--text", __file__, "--device", "cpu"]
    )
    assert f"bits per byte: {found['bits_per_byte']:.4f}" in outcome.output
    for words in (["a", "b"], ["a", "--ensemble"]):
        outcome = CliRunner().invoke(app, ["evaluate", *words, "--text", __file__])
        assert "--ensemble" in str(outcome.exception) + outcome.output
    save_model(model_of(16, vocab=400), tmp_path / "c", context=48, tokenizer=tokenizer_file, eos_id=eos_id)
    with pytest.raises(UserError, match=r"c has another vocabulary than .*a: they cannot form an ensemble"):
        optimus.evaluate([tmp_path / "a", tmp_path / "c"], text=__file__, device="cpu")
    with pytest.raises(UserError, match="no checkpoint to evaluate"):
        optimus.evaluate([], text=__file__)
