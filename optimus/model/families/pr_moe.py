"""PR-MoE: a pyramid of experts, and a dense layer beside the one that a token chooses (DeepSpeed-MoE, section 4.1).

Its definition on the blocks of this library: no class of it is published. The dense layer and the expert, times its
probability, are added.
"""

from optimus.model.families.common import OPTIONAL, RMS, SIZES
from optimus.model.families.family import unpublished

FAMILY = unpublished(
    "pr_moe",
    defaults={"experts_per_token": 1, "shared_experts": 1},
    fields=(*SIZES, "experts", "experts_by_layer"),
    optional=(*OPTIONAL, *RMS, "head_size", "expert_intermediate", "dense_layers", "sparse_every"),
)
