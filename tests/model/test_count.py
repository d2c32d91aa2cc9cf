"""Counts of parameters and of operations agree with formulas by hand."""

import pytest
import torch

from optimus.config import ModelConfig, preset_names, resolve_model
from optimus.config.load import model_config_from, preset_parameters
from optimus.model import Transformer
from optimus.model.count import count_parameters, count_parts, flops_per_token, forward_flops


def preset(name: str) -> ModelConfig:
    return model_config_from(resolve_model(name)["model"], name)


def small(**fields: object) -> ModelConfig:
    sizes = {"hidden": 32, "layers": 3, "heads": 4, "intermediate": 24, "vocab": 48}
    return ModelConfig.model_validate(sizes | fields)


OLMO, OLMOE = {"family": "olmo"}, {"family": "olmoe", "experts": 8, "experts_per_token": 2}
HAND = [name for name in preset_names() if name.startswith("mula-")]  # presets covered by the formulas below
PUBLISHED = {  # parameters of the files on Hugging Face
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "deepseek-v3": 671_026_419_200
    # The count has no router biases, which are no parameters, and no layers for multi-token prediction.
    - 58 * 256,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "olmo-2-1b": 1_484_916_736,
    "olmo-3-7b": 7_298_011_136,
}
MODELS = [
    *map(preset, HAND),
    *(small(**family, tie_embeddings=tied) for family in (OLMO, OLMOE) for tied in (False, True)),
]
IDS = [*HAND, "dense", "dense tied", "moe", "moe tied"]


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


OTHERS = {
    "grouped heads": small(family="llama", kv_heads=2, head_size=16),
    "biases": small(family="qwen2", kv_heads=2),
    "norms of heads": small(family="qwen3", kv_heads=1, head_size=12, tie_embeddings=True),
    "norms behind": small(family="olmo2"),
    "grouped heads, experts": small(family="mixtral", kv_heads=2, experts=8, experts_per_token=2),
}


@pytest.mark.parametrize("config", [*MODELS[-4:], *OTHERS.values()], ids=[*IDS[-4:], *OTHERS])
def test_the_parameters_themselves(config: ModelConfig) -> None:
    """The parameter count covers every parameter, and the FLOP count covers every matrix."""
    with torch.device("meta"):
        model = Transformer(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
    share = (config.experts_per_token or 1) / (config.experts or 1)
    matrices = [(name, weight) for name, weight in model.blocks.named_parameters() if weight.dim() > 1]
    biases = sum(weight.numel() for name, weight in matrices if name.endswith("bias"))
    met = sum(weight.numel() * (share if "experts" in name else 1) for name, weight in matrices) - biases
    scores = 12.0 * config.layers * config.heads * config.head_size * 100
    assert flops_per_token(config, 100) == 6.0 * (met + config.vocab * config.hidden) + scores


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    config = preset(name)
    assert count_parameters(config).total == PUBLISHED[name]
    with torch.device("meta"):
        model = Transformer(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_active_parameters_as_published(name: str, billions: float) -> None:
    """Active parameters without the embedding equal the published ones (gpt-oss-120b & gpt-oss-20b Model Card, table 1)."""
    config = preset(name)
    assert round((count_parameters(config).active - config.vocab * config.hidden) / 1e9, 2) == billions


@pytest.mark.parametrize("name", preset_names())
def test_the_presets_say_how_many_parameters_they_have(name: str) -> None:
    assert preset_parameters(name) == count_parameters(preset(name))._asdict()


def test_every_preset_is_counted_here() -> None:
    assert {*HAND, *PUBLISHED} == set(preset_names())


def test_scores_within_windows() -> None:
    """Windows reduce the operations of attention scores: three of four layers see 64 positions of 256."""
    config = small(family="olmo3", layers=4, window=64)
    whole = small(family="olmo3", layers=4, window=256)
    assert flops_per_token(whole, 256) - flops_per_token(config, 256) == 6.0 * 2 * 32 * 3 * (256 - 64)
    assert flops_per_token(config, 64) == flops_per_token(whole, 64)
    less = forward_flops(whole, 256)["attention"] - forward_flops(config, 256)["attention"]
    assert less == 2 * 32 * 3 / 4 * (256 - (2 * 64 - 64 * 64 / 256))  # the first 64 positions see half a window
