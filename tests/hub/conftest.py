"""Small models of both families with every weight random, and a tokenizer."""

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
}


def random_model(**config: object) -> Transformer:
    """A model with random weights and norms; hidden 16, 2 layers, 2 heads, 61 tokens unless said otherwise."""
    base = {"hidden": 16, "layers": 2, "heads": 2, "vocab": 61}
    model = Transformer(ModelConfig.model_validate(base | config))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
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
    """A byte-level BPE tokenizer without merges whose token 256 is end-of-text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path
