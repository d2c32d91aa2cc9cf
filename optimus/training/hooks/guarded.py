"""Guarded calls of users' hooks: if a hook fails, the error message of the run names the hook."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, TypeVar

from optimus.comm import CollectiveError
from optimus.comm.discipline import RefuseCollectives, RollCall
from optimus.errors import UserError, said
from optimus.resilience.exits import EndedError, Exit
from optimus.training.record import StepRecord, added_values, is_number
from optimus.training.trainer import Hook, Trainer

T = TypeVar("T")


class GuardedHook(Hook):
    """Calls a user's hook. If the hook raises an error, the run ends on all ranks."""

    def __init__(self, hook: Hook, name: str) -> None:
        self._hook, self._name = hook, name
        self.order, self.ranks = hook.order, hook.ranks
        self._failure: UserError | None = None
        self._roll_call: RollCall | None = None
        self._state: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._name

    def before_training(self, trainer: Trainer) -> None:
        self._call(trainer, "before_training", lambda: self._hook.before_training(trainer), None)

    def before_step(self, trainer: Trainer) -> None:
        self._call(trainer, "before_step", lambda: self._hook.before_step(trainer), None)

    def loss_limit(self, trainer: Trainer) -> float:
        """Returns the lowest limit of all ranks."""
        usual = super().loss_limit(trainer)
        if type(self._hook).loss_limit is Hook.loss_limit:
            return usual
        own = self._call(trainer, "loss_limit", lambda: _limit(self._hook.loss_limit(trainer)), usual)
        return min(trainer.groups.world.all_gather_object(own))

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._call(trainer, "after_step", lambda: self._measure(trainer, record), None)
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
        except (Exception, SystemExit) as error:
            raise UserError(
                f"the hook {self.name} cannot load its state from the checkpoint ({said(error)}): correct its "
                "load_state_dict, or leave the hook out"
            ) from error

    def _measure(self, trainer: Trainer, record: StepRecord) -> None:
        given = deepcopy(record)
        self._hook.after_step(trainer, given)
        record.values |= added_values(record, given)

    def _read_state(self) -> None:
        state = self._hook.state_dict()
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            raise UserError("it does not return a dictionary with text keys")
        json.dumps(state, allow_nan=False)
        self._state = dict(state)

    def _call(self, trainer: Trainer, event: str, call: Callable[[], T], otherwise: T, *, together: bool = True) -> T:
        """Returns the result of `call`, or `otherwise` once the hook has failed."""
        found = otherwise
        try:
            if self._failure is None:
                found = self._caught(trainer, event, call, otherwise, together=together)
            if together and self.ranks == "together":
                self._all_back(trainer)
        except CollectiveError as error:
            if self._failure is not None:  # the other ranks may wait for this rank in a collective of the hook
                raise EndedError(Exit.USER, f"{self._failure}; the other ranks waited for this rank") from error
            raise CollectiveError(
                f"hook {self.name}, {event}: {error}: a hook must call the same collectives on all ranks"
            ) from error
        return found

    def _caught(self, trainer: Trainer, event: str, call: Callable[[], T], otherwise: T, *, together: bool) -> T:
        try:
            with _protecting_state(trainer):
                if together and self.ranks == "together":
                    return call()
                with RefuseCollectives("its ranks are not 'together'" if together else "this method may call none"):
                    return call()
        except (EndedError, CollectiveError):
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also the exceptions of asyncio and `sys.exit`
            rank = f" on rank {trainer.groups.rank}" if trainer.groups.world.size > 1 else ""
            step = trainer.progress.step + (event in _BEFORE)
            self._failure = UserError(f"step {step}: the hook {self.name} failed in {event}{rank}: {said(error)}")
            trainer.stop(error=self._failure)
            return otherwise

    def _all_back(self, trainer: Trainer) -> None:
        """Waits until all ranks have returned from the hook, so that collectives of the hook cannot pair with
        collectives of the library."""
        if self._roll_call is None:
            seconds = trainer.config.resilience.timeout
            self._roll_call = RollCall(self.name, trainer.groups.world.size, seconds)
        # A failed rank waits half as long, so that the rank reports the error before the other ranks time out.
        self._roll_call(1.0 if self._failure is None else 0.5)


@contextmanager
def _protecting_state(trainer: Trainer) -> Iterator[None]:
    """Restores `trainer.progress` and the working directory after the block. Raises `UserError` if the block returns
    after a change of the progress or the directory."""
    progress, folder = trainer.progress, _working_folder()
    before = replace(progress, phases=[*progress.phases])
    try:
        yield
    finally:
        changed = trainer.progress is not progress or progress != before
        trainer.progress = progress
        for each in fields(progress):
            setattr(progress, each.name, getattr(before, each.name))
        moved = _working_folder() != folder
        if moved and folder is not None:
            os.chdir(folder)
    if changed:
        raise UserError("it changes trainer.progress, which counts the steps of the run")
    if moved:
        raise UserError("it changes the working folder, to which the paths of the run are relative")


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


_BEFORE = ("before_training", "before_step", "loss_limit")  # events that belong to the next step


def _limit(value: Any) -> float:
    """Returns the loss limit as a float. Raises `UserError` when `value` is not a number or is NaN."""
    if not is_number(value) or math.isnan(value):
        raise UserError(f"it returns {value!r}: return a number, or math.inf for no limit")
    return float(value)
