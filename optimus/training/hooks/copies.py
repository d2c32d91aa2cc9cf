"""A hook that copies complete checkpoints to `checkpoint.copy_to` while the run trains."""

import threading
import time
from collections.abc import Callable

from optimus.checkpoint.copying import CHECKPOINTS, Copier, checkpoints_to_copy
from optimus.errors import UserError
from optimus.training.checks import check_copies
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

_GRACE = 20.0  # maximum seconds that a run waits for its copies after a signal


class CopyCheckpoints(Hook):
    """Copies the newest complete full checkpoint, and weights that are not outdated, in threads of the first rank.

    One copy runs at a time. After a success, the hook tries failed copies again. At the end of the run, the hook waits
    for the copies: after a signal, for about 20 seconds at most; after an error before the last step, not at all.
    """

    order = Order.LAST
    ranks = "first"

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: tuple[bool, str] | None = None  # (copied, failure); (False, "") if the URL had the copy
        self._seen = 0  # modification time of the checkpoint folder when it last had no new checkpoint
        self._tried: set[str] = set()  # the checkpoints whose copy has begun; a success removes failed ones
        self._failed: set[str] = set()  # the checkpoints whose copy has failed since the last success
        self._copying = ""
        self._copy: Callable[[str], bool] | None = None

    def before_training(self, trainer: Trainer) -> None:
        section = trainer.config.checkpoint
        assert section.copy_to is not None
        self._copy = Copier(
            str(section.copy_to),
            trainer.folder,
            section.keep,
            section.weights_interval,
            lambda: check_copies(trainer.config, trainer.run.data),
        ).copy

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self._go_on(trainer)

    def after_training(self, trainer: Trainer) -> None:
        if not trainer.is_done:  # after an error, the resumed run copies the newest checkpoint
            return
        signalled = trainer.ending is not None and trainer.ending.signal
        limit = time.monotonic() + _GRACE if signalled else None
        self._seen = -1  # lists the folder again: two changes may have the same time
        while self._go_on(trainer) and (limit is None or time.monotonic() < limit):
            if self._thread is not None:
                self._thread.join(0.1)
        if self._thread is not None:
            trainer.say(f"checkpoint.copy_to: {self._copying} is not copied, as the run was stopped")

    def _go_on(self, trainer: Trainer) -> bool:
        """Reports a copy that has ended, and begins the next copy, if any. Returns True if a copy is in progress."""
        if self._thread is not None and self._thread.is_alive():
            return True
        self._thread = None
        if self._outcome is not None:
            (copied, failure), name = self._outcome, self._copying
            self._outcome = None
            if failure:
                self._failed.add(name)
                trainer.say(
                    f"checkpoint.copy_to: {name} is not copied: {failure}; the run goes on, and copies the next one"
                )
            else:
                self._tried -= self._failed
                self._failed.clear()
            if copied:
                trainer.say(f"{name} is copied to {trainer.config.checkpoint.copy_to}")
        folder = trainer.folder / CHECKPOINTS
        changed = folder.stat().st_mtime_ns if folder.exists() else 0
        if changed == self._seen:
            return False
        names = checkpoints_to_copy(trainer.folder, trainer.config.checkpoint.weights_interval)
        untried = [each for each in names if each not in self._tried]
        if not untried:
            self._seen = changed
            return False
        self._copying = untried[0]
        self._tried.add(self._copying)
        self._thread = threading.Thread(target=self._run, args=(self._copying,), name="optimus copy", daemon=True)
        self._thread.start()
        return True

    def _run(self, name: str) -> None:
        assert self._copy is not None
        try:
            self._outcome = self._copy(name), ""
        except UserError as error:
            self._outcome = False, str(error)
        except Exception as error:  # the run may have removed the checkpoint
            self._outcome = False, f"{type(error).__name__}: {error}"
