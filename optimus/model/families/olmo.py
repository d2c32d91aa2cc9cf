"""OLMo, dense (OLMo, section 2)."""

from optimus.model.families.common import CONSTANTS, OPTIONAL, SIZES, VOCABULARY, attention, mlp
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    defaults={"norm": "layer"},
    fields=SIZES,
    optional=OPTIONAL,
    constants=CONSTANTS | {"attention_bias": False, "clip_qkv": None},
    keys=VOCABULARY | attention() | mlp(),
)
