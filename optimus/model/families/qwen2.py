"""Qwen 2 and 2.5: Llama with biases of q, k and v (Qwen2 Technical Report, section 2.2)."""

from optimus.model.families.common import BEFORE, CONSTANTS, OPTIONAL, QWEN, RMS, SIZES, VOCABULARY, attention, mlp
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={"attention_bias": "qkv", "norm_eps": 1e-6},
    fields=SIZES | {"kv_heads": "num_key_value_heads"},
    optional=OPTIONAL | RMS,
    constants=CONSTANTS | {"use_sliding_window": False, "use_mrope": False},
    keys=VOCABULARY | BEFORE | attention(bias=True) | mlp(),
    without_effect=QWEN,
)
