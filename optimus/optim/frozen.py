"""Parameters that are not trained."""

from dataclasses import dataclass

from optimus.optim.rule import Rule


@dataclass(frozen=True)
class Frozen(Rule):
    """No update: the weights keep their values, in the type of computation, without master weights or moments."""
