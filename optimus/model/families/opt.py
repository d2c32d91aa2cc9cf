"""OPT (sections 2.1 and 2.2 of the OPT paper)."""

from optimus.model.families.common import affine
from optimus.model.families.family import Choice, Family, Key, Same

_DECODER = "model.decoder."
_LAYER = _DECODER + "layers.{i}."

FAMILY = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    defaults={
        "norm": "layer_affine",
        "activation": "relu",
        "gated": False,
        "mlp_bias": True,
        "attention_bias": "all",
        "tie_embeddings": True,
        "position_offset": 2,
    },
    fields={
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "intermediate": "ffn_dim",
        "vocab": "vocab_size",
        "learned_positions": "max_position_embeddings",
    },
    optional={
        "activation": Choice("activation_function", {"relu": "relu", "gelu": "gelu"}),
        "tie_embeddings": "tie_word_embeddings",
        "init_std": "init_std",
    },
    constants={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "word_embed_proj_dim": Same("hidden"),
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "quantization_config": None,
    },
    dropout=("dropout", "attention_dropout", "activation_dropout", "layerdrop"),
    keys={
        "embedding.weight": Key((_DECODER + "embed_tokens.weight",)),
        "positions.weight": Key((_DECODER + "embed_positions.weight",)),
        "head.weight": Key(("lm_head.weight",)),
        **affine("final_norm", _DECODER + "final_layer_norm"),
        **affine("blocks.{i}.attention_norm", _LAYER + "self_attn_layer_norm"),
        **affine("blocks.{i}.mlp_norm", _LAYER + "final_layer_norm"),
        **affine("blocks.{i}.attention.qkv", *(f"{_LAYER}self_attn.{name}_proj" for name in "qkv")),
        **affine("blocks.{i}.attention.out", _LAYER + "self_attn.out_proj"),
        **affine("blocks.{i}.mlp.up", _LAYER + "fc1"),
        **affine("blocks.{i}.mlp.down", _LAYER + "fc2"),
    },
)
