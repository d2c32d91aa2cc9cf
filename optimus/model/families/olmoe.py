"""OLMoE: RMSNorm, a norm over all of q and of k, dropless experts (OLMoE, section 2; the Optimus paper's Mula models)."""

from optimus.model.families.common import ATTENTION, CONSTANTS, EQUAL, KEYS, LAYER, MLP, OPTIONAL, SIZES
from optimus.model.families.family import Family, Key

_EXPERT = MLP + "experts.{e}."

FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={"norm": "rms", "qk_norm": "whole"},
    fields=SIZES | {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"},
    optional=OPTIONAL | {"renormalise": "norm_topk_prob", "norm_eps": "rms_norm_eps"},
    constants=CONSTANTS,
    equal=EQUAL,
    keys=KEYS
    | {
        "blocks.{i}.attention_norm.weight": Key((LAYER + "input_layernorm.weight",)),
        "blocks.{i}.attention.q_norm.weight": Key((ATTENTION + "q_norm.weight",)),
        "blocks.{i}.attention.k_norm.weight": Key((ATTENTION + "k_norm.weight",)),
        "blocks.{i}.mlp_norm.weight": Key((LAYER + "post_attention_layernorm.weight",)),
        "blocks.{i}.moe.router.weight": Key((MLP + "gate.weight",)),
        "blocks.{i}.moe.experts.gate_up": Key(
            (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"), fused=MLP + "experts.gate_up_proj"
        ),
        "blocks.{i}.moe.experts.down": Key((_EXPERT + "down_proj.weight",), fused=MLP + "experts.down_proj"),
        "final_norm.weight": Key(("model.norm.weight",)),
    },
)
