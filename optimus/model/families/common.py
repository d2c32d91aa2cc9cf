"""What most families have in common: names of sizes in config.json, and of tensors."""

from optimus.model.families.family import Key

LAYER, ATTENTION, MLP = "model.layers.{i}.", "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."

SIZES = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
OPTIONAL = {"tie_embeddings": "tie_word_embeddings", "rope_theta": "rope_theta", "init_std": "initializer_range"}
CONSTANTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "rope_scaling": None,
    "quantization_config": None,
}
EQUAL = {"num_key_value_heads": "num_attention_heads"}

KEYS = {
    "embedding.weight": Key(("model.embed_tokens.weight",)),
    "blocks.{i}.attention.qkv.weight": Key(tuple(f"{ATTENTION}{x}_proj.weight" for x in "qkv")),
    "blocks.{i}.attention.out.weight": Key((ATTENTION + "o_proj.weight",)),
    "head.weight": Key(("lm_head.weight",)),
}
