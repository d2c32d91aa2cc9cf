"""Chooses each parameter's update rule, and the parameters to freeze, to prune and to give low-rank factors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from fnmatch import fnmatchcase
from typing import Any, TypeVar, get_args

from torch import nn

from optimus.config.pruning import PruningConfig
from optimus.config.tree import OptimizerConfig, TrainConfig
from optimus.errors import UserError, nearest
from optimus.model import CausalModel
from optimus.model.linear import Factored
from optimus.model.parameters import Role, declarations
from optimus.optim.frozen import Frozen
from optimus.optim.reptile import Reptile
from optimus.optim.rule import Rule, UpdateRule
from optimus.optim.rules import RULES
from optimus.state.tiling import TILINGS, Tiling

T = TypeVar("T")
M = TypeVar("M", bound=CausalModel)


_BESIDE = "adamw"  # the rule for roles that the configured rule does not update by default


def tilings(config: OptimizerConfig) -> list[Tiling]:
    """Returns the tilings of all update rules in this configuration."""
    return [TILINGS[tiling] for tiling in sorted({RULES[name].kind.tiling for name in config.rules})]


def rules_of(config: OptimizerConfig, model: nn.Module, freeze: Sequence[str] = ()) -> dict[str, Rule]:
    """Returns the rule of each parameter of `model`, by name. The rule is `Frozen` for parameters that do not train.

    Raises `UserError` for an entry of a group or of `freeze` that matches no parameter, for wrong options of a rule, if
    no parameter trains, and if a rule cannot update a parameter.
    """
    roles = {name: declared.role for name, declared in declarations(model)}
    for number, group in enumerate(config.groups):
        _check_matches(f"optimizer.groups.{number}.match", group.matches, roles)
    frozen = {name for name in matching("train.freeze", freeze, roles) if roles[name] != "factor"}
    frozen |= getattr(model, "untrained", frozenset())
    if len(frozen) == len(roles):
        raise UserError("train.freeze matches every parameter of the model: leave out the parameters to train")
    return {name: Frozen() if name in frozen else _rule(config, name, role) for name, role in roles.items()}


def matching(where: str, matches: Sequence[str], roles: Mapping[str, Role]) -> list[str]:
    """Returns the names of the parameters whose role or name matches an entry of `matches`.

    Raises `UserError` for an entry that matches no parameter.
    """
    _check_matches(where, matches, roles)
    return [name for name, role in roles.items() if any(_matches(match, name, role) for match in matches)]


def with_factors(model: M, train: TrainConfig) -> M:
    """Adds low-rank factors to the projections of `model` that `train.freeze` matches, if `train.lora_rank` is set.

    Adds a note to `model.notes` if some matched projections cannot take factors. Raises `UserError` if no matched
    projection can take factors.
    """
    if train.lora_rank is None:
        return model
    roles = {name: declared.role for name, declared in declarations(model)}
    frozen = {*matching("train.freeze", train.freeze, roles)}
    with_weight = {name.rpartition(".")[0] for name in frozen if name.rpartition(".")[2].startswith("weight")}
    matched = {name: each for name, each in model.named_modules() if isinstance(each, Factored) and name in with_weight}
    projections = [each for each in matched.values() if each.takes_factors]
    without = [name for name, each in matched.items() if not each.takes_factors]
    if without:
        why = f"{len(without)} frozen projections, such as {min(without)}, whose weights are transposed or in pieces"
        if not projections:
            raise UserError(f"train.lora_rank: the model has {why}, and no other: remove train.lora_rank")
        model.notes += (f"train.lora_rank: no factors for {why}",)
    if not projections:
        raise UserError(
            "train.lora_rank adds factors to frozen projections, but train.freeze matches none: add matrix, or their names"
        )
    for each in projections:
        each.add_factors(train.lora_rank)
    return model


def pruned_by(
    pruning: PruningConfig | None, model: nn.Module, rules: Mapping[str, Rule], *, tied: bool = False
) -> list[str]:
    """Returns the names of the parameters to prune. `tied` is True if embedding and head share their weight."""
    if pruning is None:
        return []
    untrained: frozenset[str] = getattr(model, "untrained", frozenset())
    roles = {name: declared.role for name, declared in declarations(model) if name not in untrained}
    if pruning.targets is None:
        found = [name for name, role in roles.items() if role in ("matrix", "expert")]
    else:
        if "head" in pruning.targets and tied:
            raise UserError(
                "pruning.targets: the head is tied to the embedding: name embedding to prune both, or neither of them"
            )
        found = matching("pruning.targets", pruning.targets, roles)
    for name in found:
        if not rules[name].trains:
            raise UserError(
                f"pruning.targets: {name} is frozen (train.freeze) and has no state to prune: remove it from either key"
            )
    check_prunable("pruning.targets", found, rules)
    return found


def check_prunable(where: str, names: Iterable[str], rules: Mapping[str, Rule]) -> None:
    """Raises `UserError` for a pruned parameter in `names` whose update rule needs whole matrices."""
    for name in names:
        if rules[name].trains and rules[name].tiling != "flat":
            raise UserError(
                f"{where}: {type(rules[name]).__name__.lower()} updates {name} and needs whole matrices, but a pruned "
                "parameter stores only its unpruned elements: choose another rule for it (optimizer.groups)"
            )


def default_rule() -> Rule:
    """Returns the rule of a vector under the default configuration."""
    return _rule(OptimizerConfig(), "", "vector")


def _rule(config: OptimizerConfig, name: str, role: Role) -> Rule:
    numbered = [each for each in enumerate(config.groups) if any(_matches(m, name, role) for m in each[1].matches)]
    roles = RULES[config.name].roles
    usual = config.name if roles is None or role in roles else _BESIDE
    chosen, group = _last([(each.name, number) for number, each in numbered], (usual, None))
    row = RULES[chosen]
    if role in row.never:
        where = "optimizer.name" if group is None else f"optimizer.groups.{group}"
        raise UserError(
            f"{where}: {chosen} cannot update {name}, whose role is {role}: "
            "match other parameters, or give this one another rule in a later group"
        )
    decay, _ = _last([(each.weight_decay, number) for number, each in numbered], (config.weight_decay, None))
    scale, _ = _last([(each.lr_scale, number) for number, each in numbered], (1.0, None))
    rule = row.make(weight_decay=decay, lr_scale=scale, **_hyperparameters(config, chosen))
    if config.reptile_every is None:
        return rule
    if rule.averages:
        raise UserError(f"optimizer.reptile_every: {chosen} averages its weights already: choose another rule")
    every, share = config.reptile_every, config.reptile_step
    return Reptile(inner=rule, weight_decay=decay, lr_scale=scale, every=every, share=share)


def _hyperparameters(config: OptimizerConfig, rule: str) -> dict[str, Any]:
    """Returns the configured values of the fields that `rule` adds to the fields of `UpdateRule`."""
    row = RULES[rule]
    known = {name: [*_options(name)] for name in config.rules}
    for option in config.options:
        if not any(option in names for names in known.values()):
            valid = [name for names in known.values() for name in names]
            cure = nearest(option, valid) if valid else "remove it"
            raise UserError(f"optimizer.options.{option}: {' and '.join(known)} has no such hyperparameter: {cure}")
    values = {field: _value(config, key) for field, key in row.keys.items()}
    values |= {name: value for name, value in config.options.items() if name in _options(rule)}
    if missing := [
        field.name
        for field in _options(rule).values()
        if field.name not in values and row.instance is None and _required(field)
    ]:
        raise UserError(f"optimizer.options.{missing[0]} is missing: the update rule {rule} needs it")
    return values


def _options(rule: str) -> "dict[str, Field[Any]]":
    """Returns the fields of an update rule that `optimizer.options` can set, by name."""
    row, common = RULES[rule], {field.name for field in fields(UpdateRule)}
    return {field.name: field for field in fields(row.kind) if field.name not in common | row.keys.keys()}


def _required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _value(config: Any, key: str) -> Any:
    """Returns the value of a key such as `betas.0`."""
    for part in key.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


def _last(said: Sequence[tuple[T | None, int]], otherwise: tuple[T, int | None]) -> tuple[T, int | None]:
    """Returns the last (value, number) whose value is not None, else `otherwise`."""
    return next(((value, number) for value, number in reversed(said) if value is not None), otherwise)


def _matches(match: str, name: str, role: Role) -> bool:
    return role == match if match in get_args(Role) else fnmatchcase(name, match)


def _check_matches(where: str, matches: Sequence[str], roles: Mapping[str, Role]) -> None:
    known = {*roles.values(), *(re.sub(r"\.\d+\.", ".*.", name) for name in roles)}
    for match in matches:
        if not any(_matches(match, name, role) for name, role in roles.items()):
            raise UserError(f"{where}: the model has no parameter '{match}': {nearest(match, known)}")
