"""A hook that copies complete checkpoints to `checkpoint.copy_to` while the run trains."""

import threading
import time
from collections.abc import Callable

from optimus.checkpoint.copying import CHECKPOINTS, copier, newest_local
from optimus.errors import UserError
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

_GRACE = 20.0  # seconds that a run waits for its copies after a signal


class CopyCheckpoints(Hook):
    """Copies the newest complete checkpoints in a thread of the first rank, one copy at a time, the full checkpoint
    before the weights.

    The hook shows a line to the user when a copy ends or fails. At the end of the run, the hook waits for the copy of
    the newest checkpoints, but after a signal for about 20 seconds at most. After an error, the hook does not wait.
    """

    order = Order.LAST
    ranks = "first"

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: tuple[str, str] | None = None  # (checkpoint, failure) of a copy that has ended
        self._seen = 0  # modification time of the checkpoint folder when the hook last found no newer checkpoint
        self._tried: dict[str, str] = {}  # by kind, the last checkpoint whose copy the hook has begun
        self._copying = ""  # the checkpoint in `_thread`
        self._copy: Callable[[str], str] | None = None

    def before_training(self, trainer: Trainer) -> None:
        section = trainer.config.checkpoint
        assert section.copy_to is not None
        self._copy = copier(section.copy_to, str(trainer.folder), section.keep, section.weights_keep)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._go_on(trainer)

    def after_training(self, trainer: Trainer) -> None:
        if not trainer.is_done:  # after an error, the resumed run copies the newest checkpoint
            return
        signalled = trainer.ending is not None and trainer.ending.signal
        limit = time.monotonic() + _GRACE if signalled else None
        self._seen = -1  # the hook lists the folder again, since two changes may have the same time
        while self._go_on(trainer) and (limit is None or time.monotonic() < limit):
            if self._thread is not None:
                self._thread.join(0.1)
        if self._thread is not None:
            trainer.say(f"checkpoint.copy_to: {self._copying} is not copied, as the run was stopped")

    def _go_on(self, trainer: Trainer) -> bool:
        """Reports a copy that has ended, and begins to copy a newer checkpoint, if any. Returns True if a copy is in
        progress."""
        if self._thread is not None and self._thread.is_alive():
            return True
        self._thread = None
        if self._outcome is not None:
            name, failure = self._outcome
            self._outcome = None
            if failure:
                trainer.say(
                    f"checkpoint.copy_to: {name} is not copied: {failure}; the run goes on, and copies the next one"
                )
            else:
                trainer.say(f"{name} is copied to {trainer.config.checkpoint.copy_to}")
        folder = trainer.folder / CHECKPOINTS
        changed = folder.stat().st_mtime_ns if folder.exists() else 0
        if changed == self._seen:  # avoids listing the folder in each step
            return False
        newer = newest_local(trainer.folder).items() - self._tried.items()
        if not newer:
            self._seen = changed
            return False
        kind, name = min(newer)  # the full checkpoint first
        self._tried[kind] = self._copying = name
        self._thread = threading.Thread(target=self._run, args=(name,), name="optimus copy", daemon=True)
        self._thread.start()
        return True

    def _run(self, name: str) -> None:
        assert self._copy is not None
        try:
            self._copy(name)
            self._outcome = name, ""
        except UserError as error:
            self._outcome = name, str(error)
        except Exception as error:  # for example, the run has removed the checkpoint meanwhile
            self._outcome = name, f"{type(error).__name__}: {error}"
