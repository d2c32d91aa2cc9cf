"""Gemma 3, text only (Gemma 3 Technical Report, section 2)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optimus.model.families import gemma2
from optimus.model.families.common import attention, full_attention_every

_TWO = gemma2.FAMILY


def _scale(raw: Mapping[str, Any], tokens: int) -> str | None:
    # llama.cpp recognises Gemma 3 27B, which has another scale, by the number of layers.
    large = raw.get("num_hidden_layers") == 62
    scale = raw["hidden_size"] // raw["num_attention_heads"] if large else raw.get("head_dim", 256)
    return None if raw.get("query_pre_attn_scalar", 256) == scale else str(scale)


def _rows(raw: Mapping[str, Any], tokens: int) -> str | None:
    return None if raw.get("vocab_size", 0) <= tokens else f"the {tokens} tokens of the tokenizer, or fewer"


FAMILY = replace(
    _TWO,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={name: value for name, value in _TWO.defaults.items() if not name.endswith("_cap")}
    | {
        "qk_norm": "head",
        "full_attention_every": 6,
        "rope_theta": 1e6,
        "window_rope_theta": 1e4,
        "scale_windows": False,
    },
    optional={name: field for name, field in _TWO.optional.items() if name != "score_cap"}
    | {"window_rope_theta": "rope_local_base_freq"},
    constants={**_TWO.constants, "use_bidirectional_attention": False, "attn_logit_softcapping": None},
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    keys={**_TWO.keys, **attention(bias=True, norms=True)},
    without_effect=(),
    gguf={
        "attention_bias": False,
        "layer_types": full_attention_every(6),
        "query_pre_attn_scalar": _scale,
        "vocab_size": _rows,
    },
)
