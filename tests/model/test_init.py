"""Initial weights: their distribution; they depend on seed, name and global position only."""

import math

import pytest
import torch

from optimus.config import ModelConfig
from optimus.model import Transformer
from optimus.model.init import initialize, initialize_parameter
from optimus.model.parameters import Normal


def filled(
    name: str = "blocks.0.mlp.down.weight", *shape: int, seed: int = 0, std: float = 1.0, start: int = 0
) -> torch.Tensor:
    parameter = torch.empty(shape)
    initialize_parameter(name, parameter, "normal", seed, std, start)
    return parameter


def test_distribution_is_the_normal_cut_at_three_deviations() -> None:
    n = 1 << 20
    x = filled("embedding", n).double()
    # Variance of a standard normal distribution truncated at c: 1 - 2 c phi(c) / (2 Phi(c) - 1).
    density, inside = math.exp(-4.5) / math.sqrt(2 * math.pi), math.erf(3 / math.sqrt(2))
    deviation = math.sqrt(1 - 6 * density / inside)
    assert abs(x.mean()) < 5 * deviation / math.sqrt(n)
    assert abs(x.std() - deviation) < 5 * deviation / math.sqrt(2 * n)
    assert 2.99 < x.abs().max() <= 3.0
    for edge in (-2.0, -1.0, -0.5, 0.0, 0.7, 1.5, 2.5):
        expected = (math.erf(edge / math.sqrt(2)) / inside + 1) / 2
        share = (x < edge).double().mean()
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / n), edge


@pytest.mark.parametrize("bits", [0, -1])
def test_the_least_and_the_largest_draw_are_finite(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimus.model.init._hash", lambda index, key: torch.full_like(index, bits))
    parameter = torch.empty(1)
    initialize_parameter("head", parameter, Normal(1.0), 0, 1.0)
    assert 8 < abs(float(parameter)) < 9


def test_neighbours_are_independent() -> None:
    x = filled("embedding", 1 << 20)
    for lag in (1, 2, 64, 1024):
        assert abs((x[:-lag] * x[lag:]).mean()) < 5 / math.sqrt(len(x)), lag


def test_std_only_scales() -> None:
    torch.testing.assert_close(filled("head", 1000, std=0.02), 0.02 * filled("head", 1000), rtol=0, atol=0)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 700), (123, 124), (3_000, 7_777), (1_048_000, 1_050_001)])
def test_a_part_equals_the_same_place_of_the_whole(start: int, end: int) -> None:
    whole = filled("head", 1_050_001)  # more than one tile
    assert torch.equal(filled("head", end - start, start=start), whole[start:end])


def test_shape_does_not_matter() -> None:
    assert torch.equal(filled("head", 6, 10, 7).flatten(), filled("head", 420))


def test_differs_by_name_and_by_seed() -> None:
    first = filled("blocks.0.attention.out.weight", 64)
    assert torch.equal(first, filled("blocks.0.attention.out.weight", 64))
    others = [filled("blocks.1.attention.out.weight", 64), filled("blocks.0.attention.qkv.weight", 64)]
    others.append(filled("blocks.0.attention.out.weight", 64, seed=1))
    for other in others:
        assert (first == other).sum() == 0


def test_model_is_filled_norms_with_ones() -> None:
    config = ModelConfig(
        family="olmoe", hidden=16, layers=2, heads=2, intermediate=8, vocab=32, experts=4, experts_per_token=2
    )
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialize(model, seed=3, std=0.02)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert torch.equal(parameter.detach(), filled(name, *parameter.shape, seed=3, std=0.02)), name
            assert 0 < parameter.abs().max() <= 0.0601, name
