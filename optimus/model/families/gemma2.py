"""Gemma 2 (Gemma 2: Improving Open Language Models at a Practical Size, section 2)."""

from optimus.model.families.common import BIASES, OPTIONAL, RMS, SIZES, VOCABULARY, attention, mlp, norms
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={
        "norm": "rms_offset",
        "norm_place": "both",
        "norm_eps": 1e-6,
        "activation": "gelu_tanh",
        "embedding_scale": True,
        "tie_embeddings": True,
        "full_attention_every": 2,
        "score_cap": 50.0,
        "logit_cap": 30.0,
    },
    fields=SIZES
    | {
        "kv_heads": "num_key_value_heads",
        "head_size": "head_dim",
        "query_scale": "query_pre_attn_scalar",
        "window": "sliding_window",
    },
    optional=OPTIONAL
    | RMS
    | BIASES
    | {
        "full_attention_every": "layer_types",
        "score_cap": "attn_logit_softcapping",
        "logit_cap": "final_logit_softcapping",
    },
    constants={
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "use_bidirectional_attention": None,
        "quantization_config": None,
    },
    keys=VOCABULARY
    | norms(
        attention_norm="input_layernorm",
        attention_out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    )
    | attention(bias=True)
    | mlp(),
    without_effect=("sliding_window_size",),
)
