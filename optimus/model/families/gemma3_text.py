"""Gemma 3, of text: windows in five of six layers, with their own rotary base (Gemma 3 Technical Report, section 2)."""

from optimus.model.families.common import (
    AROUND,
    BIASES,
    ENDS,
    GEMMA,
    GEMMA_CONSTANTS,
    GEMMA_FIELDS,
    OPTIONAL,
    RMS,
    attention,
    mlp,
)
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults=GEMMA | {"qk_norm": "head", "window_except": 6, "rope_theta": 1e6, "window_rope_theta": 1e4},
    fields=GEMMA_FIELDS,
    optional=OPTIONAL
    | RMS
    | BIASES
    | {
        "window_except": "layer_types",
        "window_rope_theta": "rope_local_base_freq",
        "logit_cap": "final_logit_softcapping",
    },
    constants=GEMMA_CONSTANTS | {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    keys=ENDS | AROUND | attention(bias=True, norms=True) | mlp(),
)
