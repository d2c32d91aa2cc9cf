"""The rule of parameters that training does not change."""

from dataclasses import dataclass

from optimus.optim.rule import Rule


@dataclass(frozen=True)
class Frozen(Rule):
    """No update. The weights have the compute dtype, without master weights or moments."""
