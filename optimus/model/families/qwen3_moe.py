"""Qwen 3 with experts (Qwen3 Technical Report, section 2)."""

from optimus.model.families import common
from optimus.model.families.common import (
    BEFORE,
    BIASES,
    CONSTANTS,
    EXPERTS,
    OPTIONAL,
    QWEN,
    RMS,
    ROUTER,
    SIZES,
    VOCABULARY,
)
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={"qk_norm": "head", "norm_eps": 1e-6},
    fields=SIZES | EXPERTS | {"kv_heads": "num_key_value_heads", "expert_intermediate": "moe_intermediate_size"},
    optional=OPTIONAL
    | RMS
    | BIASES
    | {"head_size": "head_dim", "renormalise": "norm_topk_prob"}
    | {"sparse_every": "decoder_sparse_step", "dense_layers": "mlp_only_layers"},
    constants=CONSTANTS
    | {"use_sliding_window": False, "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    aliases={"num_local_experts": "num_experts"},
    keys=VOCABULARY | BEFORE | common.attention(bias=True, norms=True) | common.experts() | common.mlp(),
    without_effect=(*ROUTER, *QWEN),
    head_copy=True,
    gguf={"norm_topk_prob": True, "attention_bias": False},
)
