"""PR-MoE: a pyramid of experts, and a dense layer beside the one that a token chooses (DeepSpeed-MoE, section 4.1).

Its definition on the blocks of this library: no class of it is published. The dense layer and the expert, times its
probability, are added.
"""

from optimus.model.families.common import OPTIONAL, RMS, SIZES
from optimus.model.families.family import Family

FAMILY = Family(
    model_type="pr_moe",
    architecture=None,
    defaults={"experts_per_token": 1, "shared_experts": 1},
    fields=SIZES | dict.fromkeys(("experts", "experts_by_layer"), ""),
    optional=OPTIONAL | RMS | dict.fromkeys(("head_size", "expert_intermediate", "dense_layers", "sparse_every"), ""),
    constants={},
    keys={},
)
