"""The objects that a caller passes beside the configuration: hooks, an update rule and a dataset."""

import inspect
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from optimus import functions
from optimus.data.dataset import ARGUMENT
from optimus.errors import UserError
from optimus.optim.rules import RULES, RuleRow


class UserObjects(NamedTuple):
    """The caller's hooks, update rule and dataset, which `dumps` and `loads` pass to other processes."""

    hooks: Sequence[Any] = ()
    rule: RuleRow | None = None
    data: Any = None

    def register(self) -> None:
        """Adds the update rule, if any, to this process's table of rules."""
        if self.rule is not None:
            RULES.extend({self.rule.name: self.rule})

    def dumps(self) -> bytes | None:
        """Returns the pickled objects, or None if there are none. Raises `UserError` for an object that cannot be
        pickled."""
        if not self.hooks and self.rule is None and self.data is None:
            return None
        return functions.dumps(
            [
                functions.dumps([*self.hooks], "a hook of `hooks`", "name it in train.hooks"),
                functions.dumps(self.rule, "the rule of `optimizer`", "put it into a plugin"),
                functions.dumps(self.data, "`data`", "name the dataset, or a function that makes it, in data.dataset"),
            ]
        )

    @classmethod
    def loads(cls, pickled: bytes | None) -> "UserObjects":
        """Returns the objects that `dumps` has pickled."""
        return cls() if pickled is None else cls(*map(functions.loads, functions.loads(pickled)))


NO_OBJECTS = UserObjects()


def user_objects(hooks: Any, optimizer: Any, data: Any) -> tuple[UserObjects, list[str]]:
    """Returns (the objects, configuration overrides that select the update rule and the dataset).

    Registers the update rule in this process. Raises `UserError` if `optimizer` is no concrete `UpdateRule`.
    """
    rule, overrides = (None, []) if optimizer is None else _row(optimizer)
    found = UserObjects(hooks, rule, data)
    found.register()
    return found, [*overrides, *([] if data is None else [f"data.dataset={ARGUMENT}"])]


def _row(optimizer: Any) -> tuple[RuleRow, list[str]]:
    """Returns (row for an update rule, overrides). The overrides set the rule's name and, for an instance, the weight
    decay."""
    from optimus.optim.rule import UpdateRule

    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, UpdateRule) or inspect.isabstract(kind):
        raise UserError(
            f"`optimizer` is a {kind.__module__}.{kind.__qualname__}: give an `optimus.extend.UpdateRule`, "
            "a dataclass whose method `apply(now, tile)` updates a flat part of the weights. "
            "Shards, tiles and offloaded state need such a rule, and a torch.optim.Optimizer cannot update them"
        )
    name = f"{kind.__module__}.{kind.__qualname__}"
    overrides = [f"optimizer.name={json.dumps(name)}"]
    if optimizer is kind:
        return RuleRow(name, kind), overrides
    return RuleRow(name, kind, instance=optimizer), [*overrides, f"optimizer.weight_decay={optimizer.weight_decay}"]
