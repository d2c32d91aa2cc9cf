"""Numbers of parameters and of operations, against formulas by hand."""

import pytest
import torch

from optimus.config import ModelConfig, preset_names, resolve_model
from optimus.config.load import model_config_from
from optimus.model import Transformer
from optimus.model.count import count_parameters, count_parts, flops_per_token, forward_flops


def preset(name: str) -> ModelConfig:
    return model_config_from(resolve_model(name)["model"], name)


def small(**fields: object) -> ModelConfig:
    sizes = {"hidden": 32, "layers": 3, "heads": 4, "intermediate": 24, "vocab": 48}
    return ModelConfig.model_validate(sizes | fields)


OLMO, OLMOE = {"family": "olmo"}, {"family": "olmoe", "experts": 8, "experts_per_token": 2}
MODELS = [
    *map(preset, preset_names()),
    *(small(**family, tie_embeddings=tied) for family in (OLMO, OLMOE) for tied in (False, True)),
]
IDS = [*preset_names(), "dense", "dense tied", "moe", "moe tied"]


@pytest.mark.parametrize("config", MODELS, ids=IDS)
def test_numbers_by_hand(config: ModelConfig) -> None:
    h, layers, sparse = config.hidden, config.layers, config.experts is not None
    experts, chosen = config.experts or 1, config.experts_per_token or 1
    norms, router = (4 * h, h * experts) if sparse else (0, 0)
    ends = config.vocab * h * (1 if config.tie_embeddings else 2) + (h if sparse else 0)
    matrices = [4 * h * h + router + count * 3 * h * config.intermediate for count in (experts, chosen)]
    total, active = (layers * (each + norms) + ends for each in matrices)
    assert count_parameters(config) == (total, active)
    products = layers * matrices[1] + config.vocab * h
    assert flops_per_token(config, 100) == 6.0 * products + 12.0 * layers * h * 100
    inside = {"moe" if sparse else "mlp": 2.0 * (matrices[1] - 4 * h * h), "attention": 8.0 * h * h + 2.0 * h * 100}
    assert forward_flops(config, 100) == inside
    parts = count_parts(config)
    assert {part for part in parts if part.startswith("blocks.")} == {f"blocks.{i}" for i in range(layers)}
    assert len({count for part, count in parts.items() if part.startswith("blocks.")}) == 1
    twice = config.vocab * h if config.tie_embeddings else 0
    assert sum(count.total for count in parts.values()) == total + twice
    assert parts["embedding"] == parts["head"] == (config.vocab * h,) * 2


@pytest.mark.parametrize("config", MODELS[-4:], ids=IDS[-4:])
def test_the_parameters_themselves(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
