"""DeepSeek-V3 (section 2.1 of the report), without the layers for multi-token prediction."""

from collections.abc import Mapping
from typing import Any

from optimus.model.families.common import (
    ATTENTION,
    BEFORE,
    CONSTANTS,
    LAYER,
    MLP,
    OPTIONAL,
    RMS,
    ROUTER,
    SIZES,
    VOCABULARY,
    experts,
    mlp,
)
from optimus.model.families.family import Family, Further, Key, Same

_ATTENTION = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
}
_SHARED = tuple(f"{MLP}shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))


def _latent_queries(raw: Mapping[str, Any], tokens: int) -> str | None:
    return None if raw.get("q_lora_rank") is not None else "latent queries"


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={"router_score": "sigmoid", "router_bias": True, "renormalise": True, "norm_eps": 1e-6},
    fields=SIZES
    | {
        "latent": "kv_lora_rank",
        "head_size": "qk_nope_head_dim",
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_intermediate": "moe_intermediate_size",
        "shared_experts": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "expert_groups": "n_group",
        "groups_per_token": "topk_group",
        "routed_scale": "routed_scaling_factor",
    },
    optional={ours: theirs for ours, theirs in OPTIONAL.items() if ours != "kv_heads"}
    | RMS
    | {"renormalise": "norm_topk_prob"},
    constants=CONSTANTS
    | {"num_key_value_heads": Same("heads")}
    | {"attention_bias": False, "rope_interleave": True, "moe_layer_freq": 1}
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    aliases={"num_local_experts": "n_routed_experts"},
    keys=VOCABULARY
    | BEFORE
    | mlp()
    | experts()
    | {
        f"blocks.{{i}}.attention.{ours}.weight": Key((f"{ATTENTION}{name}.weight",))
        for ours, name in _ATTENTION.items()
    }
    | {
        "blocks.{i}.moe.router.bias": Key((MLP + "gate.e_score_correction_bias",)),
        "blocks.{i}.moe.shared.gate_up.weight": Key(_SHARED[:2]),
        "blocks.{i}.moe.shared.down.weight": Key(_SHARED[2:]),
    },
    further=Further("num_nextn_predict_layers", LAYER),
    # head_dim and qk_head_dim follow from other fields.
    without_effect=(*ROUTER, "head_dim", "qk_head_dim", "pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux"),
    head_copy=True,
    gguf={"q_lora_rank": _latent_queries},
)
