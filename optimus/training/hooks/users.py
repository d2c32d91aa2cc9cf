"""Imports and checks users' hooks before the run starts."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from optimus.errors import UserError, nearest, said
from optimus.plugins import Table, imported
from optimus.training.hooks.guarded import GuardedHook
from optimus.training.trainer import Hook, Order

_EVENTS = {
    "before_training": ("trainer",),
    "before_step": ("trainer",),
    "loss_limit": ("trainer",),
    "after_step": ("trainer", "record"),
    "after_error": ("trainer",),
    "after_training": ("trainer",),
    "state_dict": (),
    "load_state_dict": ("state",),
}


@dataclass(frozen=True)
class HookRow:
    """A plugin's hook. `train.hooks` chooses the hook by `name`."""

    name: str
    kind: type[Hook]


HOOKS: Table[HookRow] = Table("hook", HookRow, dict)


def users_hooks(named: Sequence[str], hooks: Sequence[Any] = (), rank: int = 0) -> list[Hook]:
    """Returns the users' hooks on this rank. `named` has names of plugins' hooks or of classes (package.module.Class).
    `hooks` has classes, instances or names.

    Raises `UserError` for a hook that the run cannot import or create, that is not a `Hook`, or that has invalid
    attributes or methods. Raises `UserError` for a `Hook.name` that two hooks share or that has no dot.
    """
    if isinstance(hooks, str | bytes) or not isinstance(hooks, Iterable):
        raise UserError(f"hooks={hooks!r}: give a list of hooks, such as `optimus.train(..., hooks=[MyHook])`")
    found = [_made(each) for each in [*named, *hooks]]
    names = [hook.name for hook in found]
    if theirs := {hook.name for hook in found if "." not in hook.name}:
        raise UserError(
            f"train.hooks: the name {min(theirs)} of a hook has no dot, like the names of ours: add one or remove `name`"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"train.hooks: two hooks have the name {min(twice)}: leave one out, or give their class a property `name`"
        )
    return [hook for hook in found if rank == 0 or hook.ranks != "first"]


def _made(entry: Any) -> Hook:
    where = f"train.hooks: {entry}" if isinstance(entry, str) else f"hooks: {entry!r}"
    kind = _imported(entry, where) if isinstance(entry, str) else entry
    if isinstance(kind, type) and issubclass(kind, Hook):
        try:
            hook = kind()
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{where} cannot be made without arguments ({said(error)}): pass an instance to `optimus.train(hooks=[...])`"
            ) from error
    elif isinstance(kind, Hook):
        hook = kind
    else:
        raise UserError(f"{where} is not a hook: make it a subclass of `optimus.Hook`")
    try:
        _check(hook, where)
        return GuardedHook(hook, _name_of(hook, where))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: one of its attributes cannot be read ({said(error)}): correct its class") from error


def _name_of(hook: Hook, where: str) -> str:
    kind = type(hook)
    name = hook.name if kind.name is not Hook.name else f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: its name is {name!r}: give a text, or remove `name`")
    return name


def _imported(name: str, where: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if name in HOOKS:
        return HOOKS[name].kind
    if not module:
        known = f" or one of {', '.join(HOOKS)}" if HOOKS else ""
        raise UserError(f"{where} names no module: give package.module.Class{known}")
    found = imported(module, where, "give package.module.Class")
    if not hasattr(found, attribute):
        classes = [each for each, value in vars(found).items() if isinstance(value, type) and issubclass(value, Hook)]
        raise UserError(f"{where}: {module} has no {attribute}: {nearest(attribute, classes)}")
    return getattr(found, attribute)


def _check(hook: Hook, where: str) -> None:
    """Raises `UserError` for an invalid `order` or `ranks`, for a `loss_limit` of the first rank alone, and for methods
    that the trainer cannot call or never calls."""
    if not isinstance(hook.order, Order):
        raise UserError(f"{where}: its order is {hook.order!r}: give an `optimus.Order`, such as Order.MEASURE")
    if hook.ranks not in ("all", "first", "together"):
        raise UserError(f"{where}: its ranks are {hook.ranks!r}: give 'all', 'first' or 'together'")
    if hook.ranks == "first" and type(hook).loss_limit is not Hook.loss_limit:
        raise UserError(f"{where} limits the loss, which all ranks must limit alike: give its ranks as 'all'")
    for name in dir(hook):
        if not name.startswith(("before_", "after_")) or name in _EVENTS:
            continue
        if callable(inspect.getattr_static(hook, name)):
            raise UserError(f"{where}: {name} is never called: {nearest(name, _EVENTS)}")
    for name, given in _EVENTS.items():
        method = getattr(hook, name)
        if not callable(method):
            raise UserError(f"{where}: {name} is {method!r}: make it a method, {name}({', '.join(given)})")
        if any(kind(method) for kind in _NOT_RUN_BY_A_CALL):
            raise UserError(
                f"{where}: {name} is `async` or has a `yield`, so a call would not run it: make it a plain method"
            )
        try:
            inspect.signature(method).bind(*given)
        except TypeError as error:
            raise UserError(f"{where}: {name} is called as {name}({', '.join(given)}): {error}") from error


_NOT_RUN_BY_A_CALL = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
