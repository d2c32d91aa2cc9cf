"""The trainer: it runs the steps of a run, and calls its hooks around them.

A step is that of `step.py`; everything besides is a hook: ours (`hooks/`, a file each), and those of users. Ranks that are
out of step cannot agree on anything any more. So a collective that fails, in the step or in a hook, ends the training at
once: hooks close what they hold, and nothing else is called.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from optimus.comm import CollectiveError, Groups
from optimus.config import RunConfig
from optimus.config.phases import phase_at
from optimus.data.loader import TokenLoader
from optimus.errors import UserError
from optimus.model import Batch
from optimus.observe.progress import ProgressBar
from optimus.observe.terminal import say_at_once
from optimus.pipeline.staged import Staged
from optimus.state.model_state import ModelState
from optimus.training.checkpointing import Checkpointer, Start
from optimus.training.record import StepClock, StepRecord
from optimus.training.run import Run, read_together
from optimus.training.step import training_step


class Order(IntEnum):
    """When a hook is called, among the others."""

    FIRST = 0
    """Nothing may be done any more in a folder that another run has taken over; rehearsed faults happen to all others."""
    WATCH = 1
    """What ends this rank, as a node is at fault, comes before work that would be lost."""
    SIGNALS = 2
    CHANGE = 3
    """The model changes before it is measured and saved."""
    MEASURE = 4
    JUDGE = 5
    """By what was measured."""
    RECORD = 6
    """A record has what all before have measured, and a checkpoint must not be newer than the records."""
    SAVE = 7
    """Before it the ranks agree on whether the run ends here, as its last checkpoint has to know."""
    LAST = 8
    """What ends the run when its checkpoint is written."""


class Hook:
    """Does nothing; subclasses override what they need. Of hooks of the same order those of users come last."""

    order: Order = Order.MEASURE
    ranks: str = "all"
    """`all`, each for itself; `first`, one for all; `together`, all with collectives."""

    def before_training(self, trainer: "Trainer") -> None:
        """Before the first step of this process."""

    def before_step(self, trainer: "Trainer") -> None:
        """Before a step, its data being there."""

    def loss_limit(self, trainer: "Trainer") -> float:
        """Above which the next step's update is left out: of all hooks the least counts. The same on all ranks."""
        return math.inf

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        """After a step; `trainer.progress` counts it already."""

    def after_error(self, trainer: "Trainer") -> None:
        """When an error that all ranks have ends the run, in the state after the last completed step."""

    def after_training(self, trainer: "Trainer") -> None:
        """At the end, also when an error ended it."""

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep of it, as JSON; that of the first rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave; on all ranks."""

    @property
    def name(self) -> str:
        """By which checkpoints know it."""
        return type(self).__name__


class Ending(NamedTuple):
    """Why a run ends before its last step: a signal, a failure, or what a hook says."""

    signal: int = 0
    error: UserError | None = None
    why: str = ""


class Trainer:
    """Trains `run` on this rank from `start` on. `progress` alone changes, beside the values of model and state."""

    def __init__(self, run: Run, start: Start, hooks: Sequence[Hook]) -> None:
        self.run, self.progress, self.origin = run, start.progress, start.origin
        self.hooks = sorted(hooks, key=lambda hook: hook.order)
        self.checkpointer = Checkpointer(run, start)
        self.display: ProgressBar | None = None
        """Of the first rank, while it trains."""
        self.ending: Ending | None = None
        """The same on all ranks."""
        self._wish: Ending | None = None  # of this rank
        self._unsaid = [*run.notes, *start.notes]
        self._load(start.hooks)

    # ---- What it trains ----

    @property
    def config(self) -> RunConfig:
        """In which nothing is left open."""
        return self.run.config

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.run.folder

    @property
    def groups(self) -> Groups:
        """Of ranks; `groups.rank` is this one."""
        return self.run.groups

    @property
    def model(self) -> Staged:
        """Its stages on this rank."""
        return self.run.model

    @property
    def state(self) -> ModelState:
        """Of the model: parameters, moments, masks."""
        return self.run.state

    @property
    def ends(self) -> bool:
        """Whether the step that was completed last is the run's last one."""
        return self.progress.step >= self.run.last_step or (self.ending is not None and self.ending.error is None)

    # ---- What hooks ask of it ----

    def say(self, line: str) -> None:
        """Show a line to the user; what other ranks than the first say is not shown."""
        if self.display is not None:
            self.display.print(line)
        elif self.groups.rank == 0:
            self._unsaid.append(line)

    def stop(self, why: str = "", *, signal: int = 0, error: UserError | None = None) -> None:
        """End the run after this step, when its checkpoint is written: all ranks, whoever of them asks. With an `error` the
        run fails. Asked by a hook that comes after checkpoints, it ends after the next step."""
        if self._wish is None or (error is not None and self._wish.error is None):
            self._wish = Ending(signal, error, why)

    def fail(self, error: UserError) -> None:
        """End the run, which has failed; to be called on all ranks alike."""
        self.ending = Ending(error=error)

    # ---- Training ----

    def fit(self) -> Ending:
        """Train to the last step of the run, or until one of the ranks is to end it; returns why it ended: the same on all
        ranks.

        Hooks are called in their order; on the way out, whatever ended it, in reverse order. Raises the `UserError` of bad
        data, bad numbers or of a hook, after hooks have saved what is good, and `CollectiveError`, which names the step,
        where another rank is lost.
        """
        try:
            self._train()
        except BaseException:
            if self._wish is not None and self._wish.error is not None:  # of a hook, on the way out
                say_at_once(f"error: {self._wish.error}")
            raise
        with naming_collectives("after the training"):
            self._agree_on_ending()
        if self.ending is not None and self.ending.error is not None:
            raise self.ending.error
        return self.ending or Ending()

    def _train(self) -> None:
        with ExitStack() as stack:
            loader = stack.enter_context(self.run.batches(self.progress.step))
            stack.callback(self.checkpointer.saver.abandon)
            stack.enter_context(self._displaying())
            for hook in self.hooks:
                hook.before_training(self)
                stack.callback(hook.after_training, self)
            with naming_collectives("before the first step"):
                self._agree_on_ending()
            while self.progress.step < self.run.last_step and self.ending is None:
                with naming_collectives(f"step {self.progress.step + 1}"):
                    self._step(loader)
            if self.ending is None:
                with naming_collectives("after the last step"):
                    self._agree_on_ending()
            if self.ending is not None and self.ending.error is not None:
                with naming_collectives(f"after step {self.progress.step}"):
                    for hook in self.hooks:
                        hook.after_error(self)
                raise self.ending.error

    def _step(self, loader: TokenLoader[Batch]) -> None:
        """One step and the hooks after it; or none, and an ending, when its data cannot be read."""
        clock = StepClock(self.groups.recorder)
        batch = self._next_batch(loader)
        if batch is None:
            return
        clock.data_is_there()
        record = self.train_step(batch, clock)
        before = [hook for hook in self.hooks if hook.order < Order.SAVE]
        for hook in before:
            hook.after_step(self, record)
        self._agree_on_ending()
        for hook in self.hooks[len(before) :]:
            hook.after_step(self, record)

    def train_step(self, batch: Batch, clock: StepClock | None = None) -> StepRecord:
        """Train on `batch`, this rank's part of a global batch, on its device. All ranks must call."""
        clock = clock or StepClock(self.groups.recorder)
        for hook in self.hooks:
            hook.before_step(self)
        limit = min((hook.loss_limit(self) for hook in self.hooks), default=math.inf)
        step = self.progress.step + 1
        phase = phase_at(self.progress.phases, step)
        sources = len(self.run.data.phases[phase.number].names) if batch.source_B is not None else 0
        schedule_step = phase.step_of_schedule(step)
        result = training_step(self.model, self.state, batch, phase.config, schedule_step, limit, sources)
        self.progress.step = step
        self.progress.skipped += result.skipped
        return StepRecord(step, result, clock.times())

    def _next_batch(self, loader: TokenLoader[Batch]) -> Batch | None:
        """The next batch on the run's device; None where any rank cannot read its part: all fail then."""
        device, reports = self.run.device, (self.progress.step + 1) % self.config.observe.log_every == 0

        def read() -> Batch:
            tokens_BS, mask_BS, document_BS, source_B = next(loader)
            return Batch(
                tokens_BS.to(device, non_blocking=True),
                None if mask_BS is None else mask_BS.to(device, non_blocking=True),
                document_BS,
                source_B.to(device, non_blocking=True) if reports and source_B is not None else None,
            )

        try:
            return read_together(read, self.groups.world)
        except CollectiveError:
            raise
        except UserError as error:
            self.fail(error)
            return None

    def _agree_on_ending(self) -> None:
        """End on all ranks where one of them is to."""
        if not self.groups.world.any(self._wish is not None):
            return
        own, self._wish = self._wish, None
        wishes = [wish for wish in self.groups.world.all_gather_object(own) if wish is not None]
        failed = next((wish for wish in wishes if wish.error is not None), None)
        if failed is not None:
            if self.ending is None or self.ending.error is None:
                self.ending = failed
        elif self.progress.step < self.run.last_step and self.ending is None:
            self.ending = max(wishes, key=lambda wish: wish.signal)
            if self.ending.why:
                self.say(f"step {self.progress.step}: the run ends here: {self.ending.why}")
            elif self.groups.rank == 0 and own is None:
                say_at_once("another rank was told to end: saving")

    @contextmanager
    def _displaying(self) -> Iterator[None]:
        """On the first rank, show what is said."""
        if self.groups.rank > 0:
            yield
            return
        with ProgressBar(every=self.config.observe.log_every) as self.display:
            for line in self._unsaid:
                self.say(line)
            self._unsaid.clear()
            yield
        self.display = None

    # ---- Checkpoints ----

    def save(self, *, full: bool, weights: bool = False) -> None:
        """Write checkpoints of the step that was completed last, or begin to: of the whole state, of the `weights` alone, of
        both. All ranks must call. Raises `UserError` on all of them as `Saver.save` does."""
        states = {hook.name: state for hook in self.hooks if (state := hook.state_dict())}
        self.checkpointer.save(self.progress, self.origin, states, full=full, weights=weights)

    def _load(self, states: Mapping[str, Any]) -> None:
        known = {hook.name: hook for hook in self.hooks}
        for name, state in states.items():
            if name in known:
                known[name].load_state_dict(state)
            else:
                self.say(f"the checkpoint has the state of {name}, a hook that this run has not: it is left out")


@contextmanager
def naming_collectives(when: str) -> Iterator[None]:
    """Say in the message of a failed collective below when it was, and what to do."""
    try:
        yield
    except CollectiveError as error:
        raise CollectiveError(f"{when}: {error}. Run again with `resume=True`") from error
