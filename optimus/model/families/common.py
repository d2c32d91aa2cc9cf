"""Fields of config.json and names of tensors for several families."""

from collections.abc import Mapping
from typing import Any

from optimus.model.families.family import Choice, Field, Key, Only

LAYER, ATTENTION, MLP = "model.layers.{i}.", "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."

SIZES: dict[str, Field] = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
OPTIONAL: dict[str, Field] = {
    "kv_heads": "num_key_value_heads",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "init_std": "initializer_range",
}
RMS: dict[str, Field] = {"norm_eps": "rms_norm_eps"}
BIASES: dict[str, Field] = {"attention_bias": Choice("attention_bias", {False: "none", True: "all"})}
EXPERTS: dict[str, Field] = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
ROUTER = ("output_router_logits", "router_aux_loss_coef")  # fields without effect on the model
QWEN = ("max_window_layers", "sliding_window")  # fields without effect if use_sliding_window is false
CONSTANTS: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "quantization_config": None}


def affine(ours: str, *theirs: str) -> dict[str, Key]:
    """Returns the `Key`s of the weight and the bias of the module `ours`, published as the modules `theirs`."""
    return {f"{ours}.{kind}": Key(tuple(f"{name}.{kind}" for name in theirs)) for kind in ("weight", "bias")}


def attention(*, bias: bool = False, norms: bool = False) -> dict[str, Key]:
    """Returns the `Key`s of the projections' weights; with `bias` also of the biases, with `norms` also of the query
    and key norms."""
    q, k, v, out = (f"{ATTENTION}{name}_proj" for name in "qkvo")
    own = "blocks.{i}.attention."
    keys: dict[str, Key] = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        names = {"qkv": (q, k, v), "q": (q,), "kv": (k, v), "out": (out,)}
        keys |= {
            f"{own}{ours}.{kind}": Key(tuple(f"{name}.{kind}" for name in theirs)) for ours, theirs in names.items()
        }
    if norms:
        keys |= {f"{own}{name}_norm.weight": Key((f"{ATTENTION}{name}_norm.weight",)) for name in "qk"}
    return keys


def norms(**names: str) -> dict[str, Key]:
    """Returns the `Key`s of the final norm and of a block's norms.

    `names` maps the names of the norms in a block to published names.
    """
    keys = {f"blocks.{{i}}.{ours}.weight": Key((f"{LAYER}{theirs}.weight",)) for ours, theirs in names.items()}
    return keys | {"final_norm.weight": Key(("model.norm.weight",))}


def mlp(*, bias: bool = False) -> dict[str, Key]:
    """Returns the `Key`s of the dense feed-forward layer."""
    keys = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        keys[f"blocks.{{i}}.mlp.gate_up.{kind}"] = Key((f"{MLP}gate_proj.{kind}", f"{MLP}up_proj.{kind}"))
        keys[f"blocks.{{i}}.mlp.down.{kind}"] = Key((f"{MLP}down_proj.{kind}",))
    return keys


def experts(
    layer: str = MLP, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Key]:
    """Returns the `Key`s of a sparse feed-forward layer. The names of unfused tensors begin with `layer`."""
    expert = layer + "experts.{e}."
    return {
        "blocks.{i}.moe.router.weight": Key((layer + "gate.weight",), fused=MLP + "gate.weight"),
        "blocks.{i}.moe.experts.gate_up": Key(
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"), fused=MLP + "experts.gate_up_proj"
        ),
        "blocks.{i}.moe.experts.down": Key((f"{expert}{down}.weight",), fused=MLP + "experts.down_proj"),
    }


BEFORE = norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
AFTER = norms(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
VOCABULARY = {"embedding.weight": Key(("model.embed_tokens.weight",)), "head.weight": Key(("lm_head.weight",))}


def no_window(raw: Mapping[str, Any], tokens: int) -> str | None:
    """Returns None without a `sliding_window`, or if the window hides no token; otherwise describes the values that
    llama.cpp needs (see `Only`)."""
    window, context = raw.get("sliding_window"), raw.get("max_position_embeddings")
    if window is None or (context is not None and context <= window):
        return None
    return f"null, for all tokens, or with a max_position_embeddings of at most {window}"


def full_attention_every(every: int) -> Only:
    """Returns an `Only` of `layer_types`: full attention in every `every`-th layer, and in no other layer."""

    def only(raw: Mapping[str, Any], tokens: int) -> str | None:
        kinds = raw.get("layer_types") or []
        right = [(kind == "full_attention") == ((layer + 1) % every == 0) for layer, kind in enumerate(kinds)]
        return None if all(right) else f"full attention in one layer of {every}, the last"

    return only
