"""Seed-OSS (ByteDance, 2025): Llama with biases of q, k and v and an independent head size."""

from optimus.extend import Family, family_parts

SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults={"attention_bias": "qkv", "norm_eps": 1e-6},
    fields=family_parts.SIZES | {"kv_heads": "num_key_value_heads", "head_size": "head_dim"},
    optional=family_parts.OPTIONAL | family_parts.RMS,
    constants={
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "quantization_config": None,
    },
    keys=family_parts.VOCABULARY | family_parts.BEFORE | family_parts.attention(bias=True) | family_parts.mlp(),
    dropout=("attention_dropout", "residual_dropout"),
)
