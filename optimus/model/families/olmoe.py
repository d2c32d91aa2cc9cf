"""OLMoE, also the Mula models of the Optimus paper (OLMoE, section 2)."""

from optimus.model.families.common import (
    BEFORE,
    CONSTANTS,
    EXPERTS,
    OPTIONAL,
    RMS,
    ROUTER,
    SIZES,
    VOCABULARY,
    attention,
    experts,
)
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={"qk_norm": "whole"},
    fields=SIZES | EXPERTS,
    optional=OPTIONAL | RMS | {"renormalise": "norm_topk_prob"},
    constants=CONSTANTS | {"attention_bias": False, "clip_qkv": None},
    keys=VOCABULARY | BEFORE | attention(norms=True) | experts(),
    without_effect=ROUTER,
    head_copy=True,
    gguf={"norm_topk_prob": False, "rms_norm_eps": 1e-5},
)
