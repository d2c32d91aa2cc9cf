"""gpt-oss (gpt-oss-120b & gpt-oss-20b Model Card, section 2). Convert MXFP4 weights to bf16 before the import."""

from optimus.model.families.common import (
    ATTENTION,
    BEFORE,
    BIASES,
    CONSTANTS,
    MLP,
    OPTIONAL,
    RMS,
    ROUTER,
    SIZES,
    VOCABULARY,
    attention,
    full_attention_every,
)
from optimus.model.families.family import Family, Key, Same

_EXPERTS = MLP + "experts."

FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        "attention_bias": "all",
        "attention_sinks": True,
        "full_attention_every": 2,
        "renormalise": True,
        "activation": "clamped_silu",
        "expert_bias": True,
        "rope_theta": 1.5e5,
        "rope_scaling": {"kind": "yarn", "factor": 32.0, "original_context": 4096, "truncate": False},
    },
    fields=SIZES
    | {
        "kv_heads": "num_key_value_heads",
        "head_size": "head_dim",
        "window": "sliding_window",
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    optional=OPTIONAL | RMS | BIASES | {"full_attention_every": "layer_types"},
    constants=CONSTANTS | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "experts_per_token": Same("experts_per_token")},
    keys=VOCABULARY
    | BEFORE
    | attention(bias=True)
    | {
        "blocks.{i}.attention.sink": Key((ATTENTION + "sinks",)),
        "blocks.{i}.moe.router.weight": Key((MLP + "router.weight",)),
        "blocks.{i}.moe.router.logit_bias": Key((MLP + "router.bias",)),
        "blocks.{i}.moe.experts.gate_up": Key((_EXPERTS + "gate_up_proj",), transposed=True, interleaved=True),
        "blocks.{i}.moe.experts.bias": Key((_EXPERTS + "gate_up_proj_bias",), interleaved=True),
        "blocks.{i}.moe.experts.down": Key((_EXPERTS + "down_proj",), transposed=True),
        "blocks.{i}.moe.down_bias": Key((_EXPERTS + "down_proj_bias",)),
    },
    without_effect=(*ROUTER, "initial_context_length"),
    head_copy=True,
    gguf={"attention_bias": True, "layer_types": full_attention_every(2)},
)
