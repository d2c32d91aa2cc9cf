"""The table of update rules. An import of this module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from optimus.plugins import Imported, Table

if TYPE_CHECKING:
    from optimus.optim.rule import UpdateRule


@dataclass(frozen=True)
class RuleRow:
    """A row of `RULES`.

    `keys` maps hyperparameters to keys of the configuration's section `optimizer`; `betas.0` is the first of `betas`.
    `optimizer.options` sets the hyperparameters that neither `keys` nor `UpdateRule` has.
    """

    name: str
    kind: type["UpdateRule"]
    keys: Mapping[str, str] = field(default_factory=dict)
    roles: tuple[str, ...] | None = None  # roles of parameters that the rule updates by default; None for all roles
    never: tuple[str, ...] = ()  # roles of parameters that the rule cannot update
    instance: "UpdateRule | None" = None  # a rule with hyperparameters already set

    def make(self, weight_decay: float, lr_scale: float, **options: Any) -> "UpdateRule":
        """Returns the rule with these hyperparameters.

        An `instance` gives the other hyperparameters, and a factor for `lr_scale`.
        """
        if self.instance is None:
            return self.kind(weight_decay=weight_decay, lr_scale=lr_scale, **options)
        lr_scale *= self.instance.lr_scale
        return replace(self.instance, weight_decay=weight_decay, lr_scale=lr_scale, **options)


BETAS = {"beta1": "betas.0", "beta2": "betas.1"}

RULES: Table[RuleRow] = Table(
    "update rule",
    RuleRow,
    lambda: Imported(
        {
            "adamw": "optimus.optim.adamw:ROW",
            "muon": "optimus.optim.muon:ROW",
            "lion": "optimus.optim.lion:ROW",
            "schedule-free": "optimus.optim.schedule_free:ROW",
        }
    ),
)
