"""OLMo: dense, LayerNorm without weights, SwiGLU, no biases (OLMo, section 2)."""

from optimus.model.families.common import CONSTANTS, EQUAL, KEYS, MLP, OPTIONAL, SIZES
from optimus.model.families.family import Family, Key

FAMILY = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    defaults={"norm": "layer"},
    fields=SIZES,
    optional=OPTIONAL,
    constants=CONSTANTS,
    equal=EQUAL,
    keys=KEYS
    | {
        "blocks.{i}.mlp.gate_up.weight": Key((MLP + "gate_proj.weight", MLP + "up_proj.weight")),
        "blocks.{i}.mlp.down.weight": Key((MLP + "down_proj.weight",)),
    },
    built_in={"norm_eps": 1e-5},
)
