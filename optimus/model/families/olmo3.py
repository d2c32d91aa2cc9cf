"""OLMo 3: OLMo 2 with windows in three of four layers."""

from collections.abc import Mapping
from typing import Any

from optimus.model.families.common import AFTER, BIASES, CONSTANTS, OPTIONAL, RMS, SIZES, VOCABULARY, attention, mlp
from optimus.model.families.family import Family


def _one_theta(raw: Mapping[str, Any], tokens: int) -> str | None:
    kinds = [kind for kind in (raw.get("rope_parameters") or {}).values() if isinstance(kind, dict)]
    return "one rope_theta for all layers" if len({kind["rope_theta"] for kind in kinds}) > 1 else None


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={
        "norm_place": "after",
        "qk_norm": "whole",
        "full_attention_every": 4,
        "rope_theta": 5e5,
        "scale_windows": False,
    },
    fields=SIZES | {"window": "sliding_window"},
    optional=OPTIONAL | RMS | BIASES | {"full_attention_every": "layer_types", "window_rope_theta": "rope_theta"},
    constants=CONSTANTS,
    keys=VOCABULARY | AFTER | attention(bias=True, norms=True) | mlp(),
    gguf={"attention_bias": False, "rope_parameters": _one_theta},
)
