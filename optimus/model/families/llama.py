"""Llama 2 and 3 (Llama 2, section 2.2; The Llama 3 Herd of Models, section 3.2)."""

from optimus.model.families.common import BEFORE, BIASES, CONSTANTS, OPTIONAL, RMS, SIZES, VOCABULARY, attention, mlp
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={"norm_eps": 1e-6},
    fields=SIZES,
    optional=OPTIONAL | RMS | BIASES | {"head_size": "head_dim", "mlp_bias": "mlp_bias"},
    constants=CONSTANTS | {"pretraining_tp": 1, "rope_interleaved": False},
    keys=VOCABULARY | BEFORE | attention(bias=True) | mlp(bias=True),
    without_effect=("max_sequence_length", "is_llama_config"),
)
