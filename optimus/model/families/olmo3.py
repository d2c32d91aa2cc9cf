"""OLMo 3: OLMo 2 with windows in three of four layers; rope_scaling does not apply to layers with a window."""

from optimus.model.families.common import AFTER, BIASES, CONSTANTS, OPTIONAL, RMS, SIZES, VOCABULARY, attention, mlp
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={
        "norm_place": "after",
        "qk_norm": "whole",
        "full_attention_every": 4,
        "rope_theta": 5e5,
        "scale_windows": False,
    },
    fields=SIZES | {"window": "sliding_window"},
    optional=OPTIONAL | RMS | BIASES | {"full_attention_every": "layer_types", "window_rope_theta": "rope_theta"},
    constants=CONSTANTS,
    keys=VOCABULARY | AFTER | attention(bias=True, norms=True) | mlp(),
)
