"""Mistral: Llama, optionally with an attention window in all layers (Mistral 7B, section 2)."""

from optimus.model.families.common import BEFORE, CONSTANTS, OPTIONAL, RMS, SIZES, VOCABULARY, attention, mlp, no_window
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={"norm_eps": 1e-6},
    fields=SIZES | {"kv_heads": "num_key_value_heads", "window": "sliding_window"},
    optional=OPTIONAL | RMS | {"head_size": "head_dim"},
    constants=CONSTANTS,
    keys=VOCABULARY | BEFORE | attention() | mlp(),
    gguf={"sliding_window": no_window},
)
