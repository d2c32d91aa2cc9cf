"""PR-MoE: a pyramid of experts; each token goes through a dense layer and one chosen expert (DeepSpeed-MoE, section 4.1).

The family is defined on the blocks of this library, because no class is published. The outputs of the dense layer and of
the expert, times its probability, are added.
"""

from optimus.model.families.common import OPTIONAL, RMS, SIZES
from optimus.model.families.family import unpublished

FAMILY = unpublished(
    "pr_moe",
    defaults={"experts_per_token": 1, "shared_experts": 1},
    fields=(*SIZES, "experts", "experts_by_layer"),
    optional=(*OPTIONAL, *RMS, "head_size", "expert_intermediate", "dense_layers", "sparse_every"),
)
