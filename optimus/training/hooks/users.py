"""Hooks of users: found by their names, checked before anything starts, and asked for one message where they fail."""

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from optimus.comm import CollectiveError
from optimus.comm.discipline import RefuseCollectives, RollCall
from optimus.errors import UserError, nearest
from optimus.resilience.exits import EndedError
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

T = TypeVar("T")
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


def users_hooks(named: Sequence[str], given: Sequence[Any] = (), rank: int = 0) -> list[Hook]:
    """The hooks of this rank that are `named` package.module.Class, and those that are `given`: classes, hooks or names.

    Raises `UserError` for one that cannot be imported, is none, could not be called, or has the name of another.
    """
    found = [_UsersHook(_made(each)) for each in [*named, *given]]
    names = [hook.name for hook in found]
    if theirs := {hook.name for hook in found if "." not in hook.name}:
        raise UserError(
            f"train.hooks: a hook is called {min(theirs)}, as the library's own are: let its `name` have a dot, or none"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"train.hooks: two hooks are called {min(twice)}: leave one out, or give their class a property `name`"
        )
    return [hook for hook in found if rank == 0 or hook.ranks != "first"]


def _made(given: Any) -> Hook:
    where = f"train.hooks: {given}" if isinstance(given, str) else f"hooks: {given!r}"
    kind = _imported(given, where) if isinstance(given, str) else given
    if isinstance(kind, type) and issubclass(kind, Hook):
        try:
            hook = kind()
        except Exception as error:
            raise UserError(
                f"{where} could not be made without arguments ({_said(error)}): give `optimus.train(hooks=[...])` a hook"
            ) from error
    elif isinstance(kind, Hook):
        hook = kind
    else:
        raise UserError(f"{where} is no hook: make it a subclass of `optimus.Hook`")
    _check(hook, where)
    return hook


def _imported(name: str, where: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if not module:
        raise UserError(f"{where} names no module: give package.module.Class")
    if os.getcwd() not in sys.path:  # of a command; a rank has it
        sys.path.append(os.getcwd())
    try:
        found = import_module(module)
    except Exception as error:
        raise UserError(
            f"{where} cannot be imported ({_said(error)}): give package.module.Class, of a module in {os.getcwd()}, "
            "on PYTHONPATH or installed"
        ) from error
    if not hasattr(found, attribute):
        classes = [each for each, value in vars(found).items() if isinstance(value, type) and issubclass(value, Hook)]
        raise UserError(f"{where}: {module} has no {attribute}: {nearest(attribute, classes)}")
    return getattr(found, attribute)


def _check(hook: Hook, where: str) -> None:
    """Raise `UserError` for what could not be called, or never would be."""
    if not isinstance(hook.order, Order):
        raise UserError(f"{where}: its order is {hook.order!r}: give an `optimus.Order`, such as Order.MEASURE")
    if hook.ranks not in ("all", "first", "together"):
        raise UserError(f"{where}: its ranks are {hook.ranks!r}: give 'all', 'first' or 'together'")
    if hook.ranks == "first" and type(hook).loss_limit is not Hook.loss_limit:
        raise UserError(f"{where} limits the loss, which all ranks must do alike: let its ranks be 'all'")
    for name in dir(hook):
        if name.startswith(("before_", "after_")) and name not in _EVENTS and callable(getattr(hook, name)):
            raise UserError(f"{where}: {name} is never called: {nearest(name, _EVENTS)}")
    for name, given in _EVENTS.items():
        try:
            inspect.signature(getattr(hook, name)).bind(*given)
        except TypeError as error:
            raise UserError(f"{where}: {name} is called as {name}({', '.join(given)}): {error}") from error


class _UsersHook(Hook):
    """Calls a user's hook. One that raises ends the run on all ranks, when its last checkpoint is written, with one message,
    and is not called again."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.order, self.ranks = hook.order, hook.ranks
        self._failed = False
        self._roll_call: RollCall | None = None
        self._state: dict[str, Any] = {}  # what it last gave

    @property
    def name(self) -> str:
        """As its class says; by default its whole name."""
        kind = type(self._hook)
        own = kind.name is not Hook.name
        return self._hook.name if own else f"{kind.__module__}.{kind.__qualname__}"

    def before_training(self, trainer: Trainer) -> None:
        self._call(trainer, "before_training", lambda: self._hook.before_training(trainer), None)

    def before_step(self, trainer: Trainer) -> None:
        self._call(trainer, "before_step", lambda: self._hook.before_step(trainer), None)

    def loss_limit(self, trainer: Trainer) -> float:
        """The least of all ranks: a step whose update some of them leave out would set them apart."""
        usual = super().loss_limit(trainer)
        if type(self._hook).loss_limit is Hook.loss_limit:
            return usual
        own = float(self._call(trainer, "loss_limit", lambda: self._hook.loss_limit(trainer), usual))
        return min(trainer.groups.world.all_gather_object(own))

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._call(trainer, "after_step", lambda: self._hook.after_step(trainer, record), None)
        if type(self._hook).state_dict is not Hook.state_dict:
            self._call(trainer, "state_dict", self._read_state, None, together=False)

    def after_error(self, trainer: Trainer) -> None:
        self._call(trainer, "after_error", lambda: self._hook.after_error(trainer), None)

    def after_training(self, trainer: Trainer) -> None:
        self._call(trainer, "after_training", lambda: self._hook.after_training(trainer), None)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)
        try:
            self._hook.load_state_dict(state)
        except Exception as error:
            raise UserError(
                f"the hook {self.name} cannot go on with its state of the checkpoint ({_said(error)}): mend its "
                "load_state_dict, or leave it out"
            ) from error

    def _read_state(self) -> None:
        state = self._hook.state_dict()
        json.dumps(state, allow_nan=False)
        self._state = dict(state)

    def _call(self, trainer: Trainer, event: str, call: Callable[[], T], otherwise: T, *, together: bool = True) -> T:
        """What `call` returns, or `otherwise` from when it has failed on."""
        found = otherwise
        try:
            if not self._failed:
                found = self._caught(trainer, event, call, otherwise, together=together)
            if together and self.ranks == "together":
                self._all_back(trainer)
        except CollectiveError as error:
            raise CollectiveError(
                f"hook {self.name}, {event}: {error}: what calls collectives must do so on all ranks alike"
            ) from error
        return found

    def _caught(self, trainer: Trainer, event: str, call: Callable[[], T], otherwise: T, *, together: bool) -> T:
        try:
            if together and self.ranks == "together":
                return call()
            with RefuseCollectives("its `ranks` are not 'together'" if together else "it may call none there"):
                return call()
        except (EndedError, CollectiveError):
            raise
        except Exception as error:
            self._failed = True
            rank = f" on rank {trainer.groups.rank}" if trainer.groups.world.size > 1 else ""
            text = f"step {trainer.progress.step}: the hook {self.name} failed in {event}{rank}: {_said(error)}"
            trainer.stop(error=UserError(text))
            return otherwise

    def _all_back(self, trainer: Trainer) -> None:
        """A rank that is still in a collective of the hook must not meet another one of ours."""
        if self._roll_call is None:
            seconds = trainer.config.resilience.timeout
            self._roll_call = RollCall(self.name, trainer.groups.world.size, seconds)
        self._roll_call()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
