"""Architectures of models that tables only name: public facts, from the configurations their makers published."""

import re

from optimus.bench.published.table import Inexpressible, Row
from optimus.plan.architecture import Architecture, Latent

_DEEPSEEK = Latent(queries=1536, keys=512, rotary=64)

_NAMED = {
    "llama27b": Architecture(32, 4096, 32, 11008, 32000),
    "llama213b": Architecture(40, 5120, 40, 13824, 32000),
    "llama234b": Architecture(48, 8192, 64, 22016, 32000, groups=8),
    "llama270b": Architecture(80, 8192, 64, 28672, 32000, groups=8),
    "llama38b": Architecture(32, 4096, 32, 14336, 128256, groups=8),
    "llama370b": Architecture(80, 8192, 64, 28672, 128256, groups=8),
    "llama3405b": Architecture(126, 16384, 128, 53248, 128256, groups=8),
    "internlm7b": Architecture(32, 4096, 32, 11008, 103168),
    "internlm20b": Architecture(60, 5120, 40, 13824, 103168),
    "deepseekv3": Architecture(
        61, 7168, 128, 18432, 129280, head=128, experts=256, experts_per_token=8, expert_intermediate=2048,
        shared_intermediate=2048, dense_layers=3, latent=_DEEPSEEK,
    ),
    "kimik2": Architecture(
        61, 7168, 64, 18432, 163840, head=128, experts=384, experts_per_token=8, expert_intermediate=2048,
        shared_intermediate=2048, dense_layers=1, latent=_DEEPSEEK,
    ),
    "qwen330b": Architecture(
        48, 2048, 32, 0, 151936, groups=4, head=128, experts=128, experts_per_token=8, expert_intermediate=768
    ),
    "qwen3235b": Architecture(
        94, 4096, 64, 0, 151936, groups=4, head=128, experts=128, experts_per_token=8, expert_intermediate=1536
    ),
    "gptoss20b": Architecture(
        24, 2880, 64, 0, 201088, groups=8, head=64, experts=32, experts_per_token=4, expert_intermediate=2880
    ),
    "gptoss120b": Architecture(
        36, 2880, 64, 0, 201088, groups=8, head=64, experts=128, experts_per_token=4, expert_intermediate=2880
    ),
    "mixtral8x7b": Architecture(
        32, 4096, 32, 0, 32000, groups=8, experts=8, experts_per_token=2, expert_intermediate=14336
    ),
    "mixtral8x22b": Architecture(
        56, 6144, 48, 0, 32000, groups=8, experts=8, experts_per_token=2, expert_intermediate=16384
    ),
}  # fmt: skip

_STATE_SPACE = ("nemotron3", "nemotronv3", "nemotronh", "qwen3next")


def named(model: str) -> Architecture:
    """The architecture of a model that many tables name, each in its own spelling. Raises `Inexpressible`."""
    words = re.sub(r"\(.*?\)", "", model).lower().strip().replace("3.1", "3")
    words = re.sub(r"[-_ ]a\d+b$", "", words)  # active parameters
    words = re.sub(r"[^a-z0-9]|moe", "", words)
    if words.startswith(_STATE_SPACE):
        raise Inexpressible(f"{model} is no transformer alone: layers of state spaces or linear attention lie between")
    words = words.removesuffix("671b")
    if words not in _NAMED:
        raise Inexpressible(f"the shapes of model '{model}' are not known")
    return _NAMED[words]


def gpt(row: Row, *, vocab: int | None = None, tied: bool = True, causal: bool = True) -> Architecture:
    """That of the row's own columns, as GPT-2 has it: four times as wide in between, not gated, the embedding tied."""
    hidden = row.size("hidden_size")
    return Architecture(
        layers=row.size("n_layers"),
        hidden=hidden,
        heads=row.size("n_heads"),
        intermediate=4 * hidden,
        vocab=vocab or row.size("vocab_size"),
        gated=False,
        tied=tied,
        causal=causal,
    )


def agree(row: Row, architecture: Architecture) -> Architecture:
    """The architecture, where what the row states of its shapes is the same. Raises `Inexpressible` otherwise."""
    for column, value in (
        ("n_layers", architecture.layers),
        ("hidden_size", architecture.hidden),
        ("n_heads", architecture.heads),
        ("vocab_size", architecture.vocab),
    ):
        if row.size(column, value) != value:
            raise Inexpressible(f"{row.text('model')} is known with {column} {value}, not {row.text(column)}")
    return architecture
