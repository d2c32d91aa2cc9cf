"""Small models of every family with random weights, and a tokenizer."""

from pathlib import Path

import pytest
import torch

from optimus.config import ModelConfig
from optimus.model import Transformer

CONFIGS = {
    "olmo": {"family": "olmo", "intermediate": 24},
    "olmo-tied": {"family": "olmo", "intermediate": 24, "tie_embeddings": True, "rope_theta": 500.0},
    "olmoe": {"family": "olmoe", "intermediate": 12, "experts": 5, "experts_per_token": 2, "norm_eps": 1e-4},
    "olmoe-tied": {"family": "olmoe", "intermediate": 12, "experts": 3, "experts_per_token": 3, "tie_embeddings": True},
    "olmo2": {"family": "olmo2", "intermediate": 24, "kv_heads": 1, "attention_bias": "all"},
    "olmo3": {
        "family": "olmo3",
        "intermediate": 24,
        "window": 5,
        "full_attention_every": 2,
        "rope_theta": 700.0,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 16},
    },
    "llama": {
        "family": "llama",
        "intermediate": 24,
        "kv_heads": 1,
        "attention_bias": "all",
        "mlp_bias": True,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_context": 32},
    },
    "mistral": {"family": "mistral", "intermediate": 24, "kv_heads": 1, "window": 7, "head_size": 12},
    "mixtral": {"family": "mixtral", "intermediate": 12, "experts": 4, "experts_per_token": 2, "kv_heads": 1},
    "gemma2": {
        "family": "gemma2",
        "intermediate": 24,
        "kv_heads": 1,
        "head_size": 12,
        "query_scale": 10,
        "window": 7,
        "score_cap": 2.0,
        "logit_cap": None,
    },
    "gemma3_text": {
        "family": "gemma3_text",
        "intermediate": 24,
        "kv_heads": 1,
        "head_size": 12,
        "query_scale": 16,
        "window": 7,
        "logit_cap": 3.0,
        "layers": 3,
        "full_attention_every": 2,
    },
    "gpt2": {"family": "gpt2", "intermediate": 24, "learned_positions": 64},
    "opt": {"family": "opt", "intermediate": 24, "learned_positions": 64},
    "qwen2": {"family": "qwen2", "intermediate": 24, "tie_embeddings": True},
    "qwen3": {"family": "qwen3", "intermediate": 24, "kv_heads": 1, "head_size": 12},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "intermediate": 24,
        "dense_layers": 1,
        "experts": 4,
        "experts_per_token": 2,
        "expert_intermediate": 12,
        "shared_experts": 2,
        "expert_groups": 2,
        "latent": {"queries": 10, "keys": 8, "rotary": 4, "value": 6},
        "head_size": 6,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "intermediate": 12,
        "experts": 4,
        "experts_per_token": 2,
        "kv_heads": 1,
        "head_size": 6,
        "window": 7,
    },
    "gpt_oss-unscaled": {
        "family": "gpt_oss",
        "intermediate": 12,
        "experts": 3,
        "experts_per_token": 2,
        "head_size": 12,
        "window": 5,
        "rope_scaling": None,
        "tie_embeddings": True,
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        "intermediate": 12,
        "dense_layers": 1,
        "experts": 4,
        "experts_per_token": 2,
        "head_size": 6,
    },
}


def random_model(**config: object) -> Transformer:
    """Returns a model with all weights and norms random; by default hidden 16, 2 layers, 2 heads, 61 tokens."""
    base = {"hidden": 16, "layers": 2, "heads": 2, "vocab": 61}
    model = Transformer(ModelConfig.model_validate(base | config))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for buffer in model.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model.eval()


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return random_model(**CONFIGS[request.param])


@pytest.fixture
def dense() -> Transformer:
    return random_model(**CONFIGS["olmo"])


@pytest.fixture
def moe() -> Transformer:
    return random_model(**CONFIGS["olmoe"])


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a byte-level BPE tokenizer without merges; token 256 is end-of-text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path
