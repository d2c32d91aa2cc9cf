"""A made-up family with parts of several published families."""

from optimus.model.families.common import (
    ATTENTION,
    BIASES,
    CONSTANTS,
    EXPERTS,
    OPTIONAL,
    RMS,
    SIZES,
    VOCABULARY,
    affine,
    mlp,
)
from optimus.model.families.common import attention as attention_keys
from optimus.model.families.common import experts as expert_keys
from optimus.model.families.family import Family, Key

_LAYER = "model.layers.{i}."

FAMILY = Family(
    model_type="made_up",
    architecture="MadeUpForCausalLM",
    defaults={
        "norm": "layer_affine",
        "norm_place": "both",
        "qk_norm": "head",
        "attention_sinks": True,
        "full_attention_every": 2,
        "router_score": "sigmoid",
        "renormalise": True,
        "expert_bias": True,
        "rope_theta": 700.0,
    },
    fields=SIZES
    | EXPERTS
    | {"window": "sliding_window", "shared_experts": "shared", "dense_layers": "first_k_dense_replace"},
    optional=OPTIONAL | RMS | BIASES | {"full_attention_every": "layer_types", "logit_cap": "final_logit_softcapping"},
    constants=CONSTANTS,
    keys=VOCABULARY
    | affine("final_norm", "model.norm")
    | affine("blocks.{i}.attention_norm", _LAYER + "norm1")
    | affine("blocks.{i}.attention_out_norm", _LAYER + "norm2")
    | affine("blocks.{i}.mlp_norm", _LAYER + "norm3")
    | affine("blocks.{i}.mlp_out_norm", _LAYER + "norm4")
    | attention_keys(bias=True, norms=True)
    | expert_keys()
    | mlp()
    | {
        "blocks.{i}.attention.sink": Key((ATTENTION + "sink",)),
        "blocks.{i}.moe.router.logit_bias": Key((_LAYER + "bias",)),
        "blocks.{i}.moe.experts.bias": Key((_LAYER + "gate_up_bias",), interleaved=True),
        "blocks.{i}.moe.down_bias": Key((_LAYER + "down_bias",)),
        "blocks.{i}.moe.shared.gate_up.weight": Key((_LAYER + "shared.gate_up.weight",), joined=True, transposed=True),
        "blocks.{i}.moe.shared.down.weight": Key((_LAYER + "shared.down.weight",)),
    },
)
