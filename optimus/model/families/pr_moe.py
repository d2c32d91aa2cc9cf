"""PR-MoE: a pyramid of experts; each token goes through a dense layer and one chosen expert (DeepSpeed-MoE, section 4.1).

`transformers` has no class for this family. A sparse block adds the output of the dense layer and the output of the expert
times the expert's probability.
"""

from optimus.model.families.common import OPTIONAL, RMS, SIZES
from optimus.model.families.family import unpublished

FAMILY = unpublished(
    "pr_moe",
    defaults={"experts_per_token": 1, "shared_experts": 1},
    fields=(*SIZES, "experts", "experts_by_layer"),
    optional=(*OPTIONAL, *RMS, "head_size", "expert_intermediate", "dense_layers", "sparse_every"),
)
