"""GPT-2 (Language Models are Unsupervised Multitask Learners, section 2.3)."""

from collections.abc import Mapping
from typing import Any

from optimus.model.families.common import affine
from optimus.model.families.family import Family, Key, Multiple

_LAYER = "transformer.h.{i}."


def _transposed(ours: str, theirs: str, *, joined: bool = False) -> dict[str, Key]:
    """Returns the keys of a projection, whose published weight is [inputs, outputs]."""
    return {
        f"blocks.{{i}}.{ours}.weight": Key((f"{_LAYER}{theirs}.weight",), joined=joined, transposed=True),
        f"blocks.{{i}}.{ours}.bias": Key((f"{_LAYER}{theirs}.bias",), joined=joined),
    }


def _four_times(raw: Mapping[str, Any], tokens: int) -> str | None:
    return None if raw.get("n_inner") in (None, 4 * raw.get("n_embd", 0)) else "4 times n_embd"


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    defaults={
        "norm": "layer_affine",
        "activation": "gelu_tanh",
        "gated": False,
        "mlp_bias": True,
        "attention_bias": "all",
        "tie_embeddings": True,
    },
    fields={
        "hidden": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "intermediate": Multiple("n_inner", 4, "n_embd"),
        "vocab": "vocab_size",
        "learned_positions": "n_positions",
    },
    optional={
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
        "init_std": "initializer_range",
    },
    constants={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "quantization_config": None,
    },
    dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    keys={
        "embedding.weight": Key(("transformer.wte.weight",)),
        "positions.weight": Key(("transformer.wpe.weight",)),
        "head.weight": Key(("lm_head.weight",)),
        **affine("final_norm", "transformer.ln_f"),
        **affine("blocks.{i}.attention_norm", _LAYER + "ln_1"),
        **affine("blocks.{i}.mlp_norm", _LAYER + "ln_2"),
        **_transposed("attention.qkv", "attn.c_attn", joined=True),
        **_transposed("attention.out", "attn.c_proj"),
        **_transposed("mlp.up", "mlp.c_fc"),
        **_transposed("mlp.down", "mlp.c_proj"),
    },
    prefix="transformer.",
    no_parameters=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
    without_effect=(
        "n_ctx",
        "n_special",
        "output_past",
        "predict_special_tokens",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    copies={"n_ctx": "n_positions"},  # the converter of llama.cpp reads n_ctx
    gguf={"n_inner": _four_times},
)
