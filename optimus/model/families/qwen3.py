"""Qwen 3, dense (Qwen3 Technical Report, section 2)."""

from optimus.model.families.common import (
    BEFORE,
    BIASES,
    CONSTANTS,
    OPTIONAL,
    QWEN,
    RMS,
    SIZES,
    VOCABULARY,
    attention,
    mlp,
)
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={"qk_norm": "head", "norm_eps": 1e-6},
    fields=SIZES | {"kv_heads": "num_key_value_heads", "head_size": "head_dim"},
    optional=OPTIONAL | RMS | BIASES,
    constants=CONSTANTS | {"use_sliding_window": False, "use_mrope": False},
    keys=VOCABULARY | BEFORE | attention(bias=True, norms=True) | mlp(),
    without_effect=QWEN,
    gguf={"attention_bias": False},
)
