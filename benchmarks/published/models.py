"""Models that tables name, or describe by some sizes: public facts, from the configurations of their makers."""

import re
from typing import Any

from pydantic import model_validator

from benchmarks.published.table import Inexpressible, Row
from optimus.config import ModelConfig, resolve_model
from optimus.config.load import model_config_from

_LLAMA, _LLAMA_3 = {"family": "llama", "vocab": 32000}, {"family": "llama", "vocab": 128256, "kv_heads": 8}
_INTERNLM = {"family": "llama", "vocab": 103168}
_KIMI = {
    "heads": 64, "vocab": 163840, "experts": 384, "dense_layers": 1, "expert_groups": 1, "groups_per_token": 1,
}  # fmt: skip
_QWEN3 = {"layers": 94, "hidden": 4096, "heads": 64, "intermediate": 12288, "expert_intermediate": 1536}
_MIXTRAL = {"layers": 56, "hidden": 6144, "heads": 48, "intermediate": 16384}


class OtherModel(ModelConfig):
    """A model of another framework, which is planned but never built, so that its fields may fit no family."""

    shared_width: int = 0  # of the expert that every token meets

    @model_validator(mode="after")
    def _makes_sense(self) -> "OtherModel":
        return self

    @property
    def shared_intermediate(self) -> int:
        return self.shared_width


def _preset(name: str, **changes: Any) -> ModelConfig:
    return model_config_from(resolve_model(name)["model"] | changes, name)


def _sized(shared: dict[str, Any], layers: int, hidden: int, heads: int, intermediate: int, **more: Any) -> ModelConfig:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": intermediate}
    return model_config_from(shared | sizes | more, "bench.published")


_NAMED = {
    "llama27b": _sized(_LLAMA, 32, 4096, 32, 11008),
    "llama213b": _sized(_LLAMA, 40, 5120, 40, 13824),
    "llama234b": _sized(_LLAMA, 48, 8192, 64, 22016, kv_heads=8),
    "llama270b": _sized(_LLAMA, 80, 8192, 64, 28672, kv_heads=8),
    "llama38b": _sized(_LLAMA_3, 32, 4096, 32, 14336),
    "llama370b": _sized(_LLAMA_3, 80, 8192, 64, 28672),
    "llama3405b": _sized(_LLAMA_3, 126, 16384, 128, 53248),
    "internlm7b": _sized(_INTERNLM, 32, 4096, 32, 11008),
    "internlm20b": _sized(_INTERNLM, 60, 5120, 40, 13824),
    "deepseekv3": _preset("deepseek-v3"),
    "kimik2": _preset("deepseek-v3", **_KIMI),
    "qwen330b": _preset("qwen3-30b-a3b"),
    "qwen3235b": _preset("qwen3-30b-a3b", **_QWEN3),
    "gptoss20b": _preset("gpt-oss-20b", window=None),  # measured steps are as long as without windows
    "gptoss120b": _preset("gpt-oss-120b", window=None),
    "mixtral8x7b": _preset("mixtral-8x7b"),
    "mixtral8x22b": _preset("mixtral-8x7b", **_MIXTRAL),
}

_STATE_SPACE = ("nemotron3", "nemotronv3", "nemotronh", "qwen3next")


def named(model: str) -> ModelConfig:
    """Returns the model that many tables name, each in its own spelling. Raises `Inexpressible`."""
    words = re.sub(r"\(.*?\)", "", model).lower().strip().replace("3.1", "3")
    words = re.sub(r"[-_ ]a\d+b$", "", words)  # active parameters
    words = re.sub(r"[^a-z0-9]|moe", "", words)
    if words.startswith(_STATE_SPACE):
        raise Inexpressible(f"{model} is no transformer alone: layers of state spaces or linear attention lie between")
    words = words.removesuffix("671b")
    if words not in _NAMED:
        raise Inexpressible(f"the shapes of model '{model}' are not known")
    return _NAMED[words]


def gpt(layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> OtherModel:
    """Returns a model like GPT-2: four times as wide inside, not gated, embedding tied; `more` fields replace others."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "intermediate": 4 * hidden}
    return OtherModel.model_validate({"family": "gpt2"} | sizes | more)


def gpt_of(row: Row, **more: Any) -> OtherModel:
    """Returns `gpt` of the row's own columns, with learned positions."""
    given = {"vocab": row.size("vocab_size") if "vocab" not in more else 0, "learned_positions": row.size("seq_len")}
    return gpt(row.size("n_layers"), row.size("hidden_size"), row.size("n_heads"), **(given | more))


def agree(row: Row, model: ModelConfig) -> ModelConfig:
    """Returns the model if its shapes are those that the row states. Raises `Inexpressible` otherwise."""
    for column, value in (
        ("n_layers", model.layers),
        ("hidden_size", model.hidden),
        ("n_heads", model.heads),
        ("vocab_size", model.vocab),
    ):
        if row.size(column, value) != value:
            raise Inexpressible(f"{row.text('model')} is known with {column} {value}, not {row.text(column)}")
    return model
