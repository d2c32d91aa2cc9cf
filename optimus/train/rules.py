"""Which update rule each parameter has, as configured."""

from torch import nn

from optimus.config.tree import OptimizerConfig
from optimus.optim.adamw import AdamW
from optimus.optim.rule import Rule


def rules_of(config: OptimizerConfig, model: nn.Module) -> dict[str, Rule]:
    """By name of a parameter."""
    beta1, beta2 = config.betas
    rule = AdamW(weight_decay=config.weight_decay, beta1=beta1, beta2=beta2, eps=config.eps)
    return {name: rule for name, _ in model.named_parameters()}
