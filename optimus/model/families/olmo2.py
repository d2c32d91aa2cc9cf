"""OLMo 2 (2 OLMo 2 Furious, section 3.1)."""

from optimus.model.families.common import AFTER, BIASES, CONSTANTS, OPTIONAL, RMS, SIZES, VOCABULARY, attention, mlp
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={"norm_place": "after", "qk_norm": "whole"},
    fields=SIZES,
    optional=OPTIONAL | RMS | BIASES,
    constants=CONSTANTS,
    keys=VOCABULARY | AFTER | attention(bias=True, norms=True) | mlp(),
    gguf={"attention_bias": False},
)
