"""Runs the steps of a run and calls hooks.

After a failed collective, in the step or in a hook, the training ends at once. The trainer then calls only
`after_training` of the hooks.
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
from optimus.pipeline.staged import PipelineStages
from optimus.state.model_state import ModelState
from optimus.training.checkpointing import Checkpointer, Start
from optimus.training.record import StepClock, StepRecord
from optimus.training.run import Run, read_together
from optimus.training.step import training_step


class Order(IntEnum):
    """The position of a hook in the calling order.

    Example:
        class Log(optimus.Hook):
            order = optimus.Order.RECORD
    """

    FIRST = 0
    """Checks that no other run has taken the folder over, and injects faults."""
    WATCH = 1
    """Detects hangs, slow ranks and soft failures."""
    SIGNALS = 2
    CHANGE = 3
    """Prunes the model and tunes matmuls, before measurements and checkpoints."""
    MEASURE = 4
    JUDGE = 5
    """Detects loss spikes."""
    RECORD = 6
    """Records the measurements of earlier hooks. This order precedes SAVE, so that a step's records precede the step's
    checkpoint."""
    SAVE = 7
    """Saves checkpoints, after the ranks have agreed on whether the run ends."""
    LAST = 8
    """Runs after the checkpoint."""


class Hook:
    """A hook that does nothing; subclasses override methods.

    Example:
        class Stop(optimus.Hook):
            def after_step(self, trainer, record):
                if record.result.loss < 9.0:
                    trainer.stop("the loss is low enough")


        optimus.train("first.yaml", ["train.output=runs/stopped"], hooks=[Stop])
    """

    order: Order = Order.MEASURE
    ranks: str = "all"
    """`all` or `together` if all ranks call the hook, `first` if only the first rank calls the hook. With `together`, a
    user's hook may use collectives."""

    def before_training(self, trainer: "Trainer") -> None:
        """Runs before the first step of this process."""

    def before_step(self, trainer: "Trainer") -> None:
        """Runs before a step, after the trainer has read the data of the step."""

    def loss_limit(self, trainer: "Trainer") -> float:
        """Returns the loss above which the trainer skips the update of the next step.

        The trainer applies the lowest limit of all hooks. A hook of the library must return the same limit on all
        ranks.
        """
        return math.inf

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        """Runs after a step, which `trainer.progress` already counts."""

    def after_error(self, trainer: "Trainer") -> None:
        """Runs, before `after_training`, when `Trainer.stop` or `Trainer.fail` ends the training with an error."""

    def after_training(self, trainer: "Trainer") -> None:
        """Runs at the end of training, also after an error, if `before_training` has returned."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that checkpoints save for this hook. JSON must be able to represent the state. Checkpoints
        save the state of the first rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores this hook's state from a checkpoint, before training."""

    @property
    def name(self) -> str:
        """The name under which checkpoints store the hook's state; by default the name of the class."""
        return type(self).__name__


class Ending(NamedTuple):
    """The reason why a run ends early or fails: a signal, an error, or a hook's explanation."""

    signal: int = 0
    error: UserError | None = None
    why: str = ""


class Trainer:
    """Trains `run` on this rank from `start` on; hooks are called with the trainer.

    Example:
        class Count(optimus.Hook):
            def after_training(self, trainer):
                print(trainer.progress.step)
    """

    def __init__(self, run: Run, start: Start, hooks: Sequence[Hook]) -> None:
        self.run, self.progress, self.origin = run, start.progress, start.origin
        self.hooks = sorted(hooks, key=lambda hook: hook.order)
        self.checkpointer = Checkpointer(run, start)
        self.display: ProgressBar | None = None
        """The progress bar of the first rank during training, or None."""
        self.ending: Ending | None = None
        """The reason why the run ends early or fails, or None; the same on all ranks."""
        self._wish: Ending | None = None  # this rank's request to end the run, until the ranks have agreed
        self._unsaid = [*run.notes, *start.notes]
        self._load(start.hooks)

    # ---- Properties ----

    @property
    def config(self) -> RunConfig:
        """The configuration of the run, in which every option is decided."""
        return self.run.config

    @property
    def folder(self) -> Path:
        """The run folder, `train.output`."""
        return self.run.folder

    @property
    def groups(self) -> Groups:
        """The process groups; `groups.rank` is this rank."""
        return self.run.groups

    @property
    def model(self) -> PipelineStages:
        """The pipeline stages of the model on this rank."""
        return self.run.model

    @property
    def state(self) -> ModelState:
        """The state of the model: parameters, moments, masks."""
        return self.run.state

    @property
    def is_done(self) -> bool:
        """True if the run has reached its last step, or ends early without an error."""
        return self.progress.step >= self.run.last_step or (self.ending is not None and self.ending.error is None)

    # ---- Calls for hooks ----

    def say(self, line: str) -> None:
        """Shows a line on the first rank, at the earliest when `fit` begins; drops the line on other ranks."""
        if self.display is not None:
            self.display.print(line)
        elif self.groups.rank == 0:
            self._unsaid.append(line)

    def stop(self, why: str = "", *, signal: int = 0, error: UserError | None = None) -> None:
        """Ends the run on all ranks, at the latest after the next step, even if only one rank calls this method."""
        if self._wish is None or (error is not None and self._wish.error is None):
            self._wish = Ending(signal, error, why)

    def fail(self, error: UserError) -> None:
        """Ends the run as failed; all ranks must call this method with equal errors."""
        self.ending = Ending(error=error)

    # ---- Training ----

    def fit(self) -> Ending:
        """Trains to the last step of the run, or until any rank ends the run early.

        Returns the reason for an early end, or an empty `Ending`; all ranks return the same ending. Raises the
        `UserError` given to `stop` or `fail`.
        """
        try:
            self._train()
        except BaseException:
            if self._wish is not None and self._wish.error is not None:  # the ranks have not agreed on this error yet
                say_at_once(f"error: {self._wish.error}")
            raise
        with naming_collectives("after the training"):
            self._agree_on_ending()
        if self.ending is not None and self.ending.error is not None:
            raise self.ending.error
        return self.ending or Ending()

    def _train(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.run.data.restore_streams)
            stack.enter_context(self.run.data.keeping_checksums(self.run.folder / "row-checksums"))
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
        """Trains one step on `batch`, this rank's part of the global batch. All ranks must call this method.

        The tensors of `batch` must be on the run's device, except `document_BS`, which must be on the host.
        """
        clock = clock or StepClock(self.groups.recorder)
        for hook in self.hooks:
            hook.before_step(self)
        limit = min((hook.loss_limit(self) for hook in self.hooks), default=math.inf)
        step = self.progress.step + 1
        phase = phase_at(self.progress.phases, step)
        sources = len(self.run.data.phases[phase.number].names) if batch.source_B is not None else 0
        progress, schedule_step = self.progress, phase.step_of_schedule(step)
        if schedule_step == 1:  # a phase with its own schedule begins
            progress.schedule_lag = 0
        schedule_step -= progress.schedule_lag
        scale = progress.loss_scale
        result = training_step(self.model, self.state, batch, phase.config, schedule_step, limit, sources, scale)
        progress.step = step
        progress.skipped += result.skipped and not result.overflow
        if scale is not None:
            progress.overflows += result.overflow
            progress.schedule_lag += result.overflow
            progress.loss_scale = scale.after(not math.isfinite(result.grad_norm), self.config.train.loss_scale)
        return StepRecord(step, result, clock.times())

    def _next_batch(self, loader: TokenLoader[Batch]) -> Batch | None:
        """Returns the next batch on the run's device, with the documents on the host. If a rank cannot read its part,
        all ranks end the run as failed and return None."""
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
                say_at_once("another rank was told to end: saving a checkpoint")

    @contextmanager
    def _displaying(self) -> Iterator[None]:
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
        """Writes, or begins to write, checkpoints of the last completed step: the whole state (`full`), the `weights`
        alone, or both. All ranks must call this method."""
        states = {hook.name: state for hook in self.hooks if (state := hook.state_dict())}
        self.checkpointer.save(self.progress, self.origin, states, full=full, weights=weights)

    def _load(self, states: Mapping[str, Any]) -> None:
        known = {hook.name: hook for hook in self.hooks}
        for name, state in states.items():
            if name in known:
                known[name].load_state_dict(state)
            else:
                self.say(
                    f"the checkpoint has the state of the hook {name}, which this run does not use: the state is ignored"
                )


@contextmanager
def naming_collectives(when: str) -> Iterator[None]:
    """Adds `when` and a remedy to the message of a `CollectiveError` raised inside the context."""
    try:
        yield
    except CollectiveError as error:
        raise CollectiveError(f"{when}: {error}. Run again with `resume=True`") from error
