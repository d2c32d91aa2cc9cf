"""PR-MoE: a pyramid of experts, with one shared expert (DeepSpeed-MoE, section 4.1)."""

from optimus.model.families.common import OPTIONAL, RMS, SIZES
from optimus.model.families.family import unpublished

FAMILY = unpublished(
    "pr_moe",
    defaults={"experts_per_token": 1, "shared_experts": 1},
    fields=(*SIZES, "experts", "experts_by_layer"),
    optional=(*OPTIONAL, *RMS, "head_size", "expert_intermediate", "dense_layers", "sparse_every"),
)
