"""Noted initial values are those that the model's own initialisation gives, and buffers have their values."""

import math

import pytest
import torch

from helpers.model_facts import configuration
from helpers.sweep import in_turns
from optimus.model.foreign.initial import Initial, initial_values, without_initial
from optimus.model.foreign.twin import build, small

pytest.importorskip("transformers", minversion="5.20")

ALWAYS = ["gpt2", "falcon_h1", "kimi_linear"]
KINDS = [
    *ALWAYS,
    *(
        "llama",
        "qwen3_moe",
        "gemma3_text",
        "nemotron_h",
        "mamba2",
        "qwen3_next",
        "apertus",
        "openai-gpt",
        "deepseek_v4",
    ),
    *(
        "opt",
        "bert",
        "granitemoe",
        "lfm2",
        "hy_v4",
        "gpt_oss",
        "olmo_hybrid",
        "bloom",
        "falcon",
        "stablelm",
        "phi3",
        "modernbert-decoder",
    ),
]


def agrees(initial: Initial, own: torch.Tensor) -> bool:
    """Returns whether values may be drawn from what was noted, within six standard errors."""
    values, count = own.detach().double().flatten(), own.numel()
    if initial.kind == "constant":
        return bool(torch.allclose(values, torch.full_like(values, initial.value)))
    if initial.values is not None:
        noted = initial.values.double().expand(own.shape).flatten()
        error = 6 * float(noted.std()) / math.sqrt(count) if count > 1 else 0.0
        return (
            torch.allclose(values, noted, rtol=1e-4, atol=1e-6)
            or abs(float(values.mean() - noted.mean())) <= error + 0.5
        )
    if count < 64:
        return bool((values - initial.mean).abs().max() <= 6 * initial.std)
    mean_error, std_error = 6 / math.sqrt(count), 6 / math.sqrt(2 * count) + 0.02  # rows of padding are zero
    if initial.kind == "normal" and initial.high is not None and initial.high < 4 * initial.std:
        return float(values.abs().max()) <= initial.high and float(values.std()) < initial.std
    near = abs(float(values.mean()) - initial.mean) <= mean_error * initial.std
    return near and abs(float(values.std()) / initial.std - 1) <= std_error


@pytest.mark.parametrize("kind", in_turns(KINDS, 6, always=len(ALWAYS)))
def test_noted_values_are_those_of_the_model(kind: str) -> None:
    config = small(configuration(kind))
    noted = initial_values(meta := build(config, device="meta"))
    torch.manual_seed(5)
    model = build(config)
    assert not without_initial(meta, noted)
    wrong = [name for name, each in model.named_parameters() if not agrees(noted[name], each)]
    assert not wrong
    assert {name: each.shape for name, each in meta.named_buffers()} == {
        name: each.shape for name, each in model.named_buffers()
    }
    for name, own in model.named_buffers():
        assert torch.equal(dict(meta.named_buffers())[name], own), name


def test_residual_projections_of_gpt2_are_scaled() -> None:
    noted = initial_values(build(configuration("gpt2"), device="meta"))
    assert noted["transformer.h.0.attn.c_proj.weight"].std == pytest.approx(0.02 / math.sqrt(24))
    assert noted["transformer.h.0.attn.c_attn.weight"].std == pytest.approx(0.02)
    assert noted["transformer.h.0.ln_1.weight"].value == 1.0


class Scaled(torch.nn.Module):
    """Parameters too large to compute, which are random numbers times a negative factor."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("normal", "truncated", "uniform"):
            setattr(self, name, torch.nn.Parameter(torch.empty(2048, 2048, device="meta")))

    @torch.no_grad()
    def initialize_weights(self) -> None:
        from transformers import initialization

        initialization.normal_(self.normal, 1.0, 0.5)
        initialization.trunc_normal_(self.truncated, 0.0, 0.5, -1.0, 3.0)
        initialization.uniform_(self.uniform, 1.0, 2.0)
        for each in self.parameters():
            initialization.copy_(each, -2 * each)


def test_a_negative_factor_mirrors_the_distribution() -> None:
    noted = initial_values(Scaled())
    expected = {
        "normal": Initial("normal", -2.0, 1.0),
        "truncated": Initial("normal", 0.0, 1.0, -6.0, 2.0),
        "uniform": Initial("uniform", -3.0, 2 / math.sqrt(12), -4.0, -2.0),
    }
    assert {name for name, each in noted.items() if each.same_as(expected[name])} == {*expected}


def test_random_values_follow_the_seed() -> None:
    config = small(configuration("kimi_linear"))
    first, again, other = (initial_values(build(config, device="meta"), seed) for seed in (1, 1, 2))
    name = "model.layers.0.self_attn.forget_gate.dt_bias"
    assert first[name].same_as(again[name])
    assert not first[name].same_as(other[name])


def test_the_state_of_random_numbers_stays() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    initial_values(build(small(configuration("mamba2")), device="meta"))
    assert torch.equal(torch.rand(1), expected)


def test_values_that_nothing_sets_are_named() -> None:
    model = build(small(configuration("llama")), device="meta")
    with torch.device("meta"):
        model.model.layers[0].extra = torch.nn.Parameter(torch.empty(3))
    assert without_initial(model, initial_values(model)) == ("model.layers.0.extra",)


def test_empty_buffers_have_their_values() -> None:
    model = torch.nn.Module()
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("unset", torch.full((2,), math.nan))
    assert without_initial(model, {}) == ("unset",)
