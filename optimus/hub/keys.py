"""The key table: our parameters and the tensors they are in a Hugging Face folder, for each family.

Every published tensor is a view of one of our parameters, got by indexing its leading dims: [e] the expert, where the
published name says {e}; then [n] the n-th name, where a parameter stacks several tensors. Export writes these views and
import copies into them, so both directions are the same table and exact.

Newer `transformers` may save the experts of a layer as one tensor: the parameter with its middle dims flattened.

Legend: E experts, I intermediate, H hidden.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Key(NamedTuple):
    """One kind of parameter: its published names and, where there is one, its fused form's; {i} is the layer."""

    names: tuple[str, ...]
    fused: str | None = None


_LAYER, _ATTENTION, _MLP = "model.layers.{i}.", "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
_EXPERT = _MLP + "experts.{e}."

_BOTH = {
    "embedding.weight": Key(("model.embed_tokens.weight",)),
    "blocks.{i}.attention.qkv.weight": Key(tuple(f"{_ATTENTION}{x}_proj.weight" for x in "qkv")),
    "blocks.{i}.attention.out.weight": Key((_ATTENTION + "o_proj.weight",)),
    "head.weight": Key(("lm_head.weight",)),
}
TABLES: dict[str, dict[str, Key]] = {
    "olmo": _BOTH
    | {
        "blocks.{i}.mlp.gate_up.weight": Key((_MLP + "gate_proj.weight", _MLP + "up_proj.weight")),
        "blocks.{i}.mlp.down.weight": Key((_MLP + "down_proj.weight",)),
    },
    "olmoe": _BOTH
    | {
        "blocks.{i}.attention_norm.weight": Key((_LAYER + "input_layernorm.weight",)),
        "blocks.{i}.attention.q_norm.weight": Key((_ATTENTION + "q_norm.weight",)),
        "blocks.{i}.attention.k_norm.weight": Key((_ATTENTION + "k_norm.weight",)),
        "blocks.{i}.mlp_norm.weight": Key((_LAYER + "post_attention_layernorm.weight",)),
        "blocks.{i}.moe.router.weight": Key((_MLP + "gate.weight",)),
        "blocks.{i}.moe.experts.gate_up": Key(
            (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"), fused=_MLP + "experts.gate_up_proj"
        ),
        "blocks.{i}.moe.experts.down": Key((_EXPERT + "down_proj.weight",), fused=_MLP + "experts.down_proj"),
        "final_norm.weight": Key(("model.norm.weight",)),
    },
}


def published(family: str, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(published name, view of `parameter`) for every tensor that our parameter `name` is made of."""
    key, layer = _find(family, name)
    per_expert = "{e}" in key.names[0]
    for e, expert in enumerate(parameter) if per_expert else [(0, parameter)]:
        stacked = expert if len(key.names) > 1 else expert[None]
        for pattern, view in zip(key.names, stacked, strict=True):
            yield pattern.format(i=layer, e=e), view


def fused(family: str, name: str, parameter: Tensor) -> tuple[str, Tensor] | None:
    """(name, view of `parameter` [E, 2 I, H] or [E, H, I]) of the fused form; None where there is none."""
    key, layer = _find(family, name)
    if key.fused is None:
        return None
    return key.fused.format(i=layer), parameter.view(len(parameter), -1, parameter.shape[-1])


def _find(family: str, name: str) -> tuple[Key, str]:
    layer = re.match(r"blocks\.(\d+)\.", name)
    return TABLES[family][re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)], layer[1] if layer else ""
