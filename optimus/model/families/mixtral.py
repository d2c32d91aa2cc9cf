"""Mixtral: Mistral with experts (Mixtral of Experts, section 2)."""

from optimus.model.families.common import (
    BEFORE,
    CONSTANTS,
    LAYER,
    OPTIONAL,
    RMS,
    ROUTER,
    SIZES,
    VOCABULARY,
    attention,
    experts,
    no_window,
)
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={"renormalise": True, "rope_theta": 1e6},
    fields=SIZES
    | {"kv_heads": "num_key_value_heads", "experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    optional=OPTIONAL | RMS | {"head_size": "head_dim", "window": "sliding_window"},
    constants=CONSTANTS | {"router_jitter_noise": 0.0},
    keys=VOCABULARY | BEFORE | attention() | experts(LAYER + "block_sparse_moe.", gate="w1", up="w3", down="w2"),
    without_effect=ROUTER,
    head_copy=True,
    gguf={"sliding_window": no_window},
)
