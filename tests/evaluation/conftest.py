"""Fixtures: a small tokenizer, small random models, and a checkpoint of one of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus.checkpoint.store import save_model
from optimus.config import ModelConfig
from optimus.data.tokenizer import inspect, load, train
from optimus.model import Transformer
from optimus.model.init import initialize

CONTEXT = 48


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Runs torch on one thread: threads that wait for each other slow down models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train([Path(__file__).read_text(), "Question: who? Answer: nobody."], 320, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Any:
    return load(tokenizer_file)


@pytest.fixture(scope="session")
def eos_id(tokenizer_file: Path) -> int:
    return inspect(tokenizer_file).eos_id


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Transformer]:
    """A function that makes a random model. Its weights are larger than initial ones, so that predictions differ
    between positions."""

    def make(family: str = "olmoe", std: float = 0.3, dtype: torch.dtype = torch.float32) -> Transformer:
        experts = {"experts": 4, "experts_per_token": 2} if family == "olmoe" else {}
        config = ModelConfig(family=family, hidden=16, layers=2, heads=2, intermediate=24, vocab=328, **experts)
        model = Transformer(config)
        initialize(model, 0, std)
        return model.to(dtype).eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Transformer]) -> Transformer:
    return make_model()


@pytest.fixture
def checkpoint(tmp_path: Path, model: Transformer, tokenizer_file: Path, eos_id: int) -> Path:
    folder = tmp_path / "checkpoint"
    save_model(model, folder, context=CONTEXT, tokenizer=tokenizer_file, eos_id=eos_id)
    return folder
