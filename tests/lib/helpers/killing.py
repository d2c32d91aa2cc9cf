"""Runs of two ranks that are killed by SIGKILL at random moments, and the comparison of their checkpoints."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.trained import trainer_of
from optimus.checkpoint import saving, slots
from optimus.checkpoint.folder import list_checkpoints
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.staging import Staging
from optimus.observe.metrics import read_metrics
from optimus.testing import RankError, run_ranks
from optimus.training.environment import record_start


def train_slowly_written(config: dict[str, Any], resume: bool, signs: Path) -> None:
    """Trains one rank of a run as the launcher would; writes its process id and the first step into `signs`."""
    slow_down(0.02 if config["checkpoint"]["asynchronous"] else 0.08)
    rank = dist.get_rank()
    (signs / f"pid-{rank}").write_text(str(os.getpid()))
    trainer = trainer_of(config, resume)
    if rank == 0:
        record_start(trainer.run, trainer.progress.step)
        (signs / "began").write_text(str(trainer.progress.step))
    trainer.fit()
    trainer.state.finish()


def slow_down(writing: float) -> None:
    """Slows down every phase of a checkpoint so that kills meet it. The patches stay: each process trains once."""

    def slowed(right: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*arguments: Any) -> Any:
            time.sleep(seconds)
            return right(*arguments)

        return slow

    Staging._copy = slowed(Staging._copy, 0.003)  # type: ignore[method-assign]
    saving.write_slices = slowed(saving.write_slices, writing)
    saving.sync = slowed(saving.sync, 0.002)
    slots.shutil = type("", (), {"rmtree": staticmethod(slowed(shutil.rmtree, 0.004))})  # type: ignore[assignment]


class Killer:
    """Kills both ranks together `seconds` after their start, unless the training ends before.

    A killer that is `aimed` at a phase also waits up to three seconds for that phase: random moments may never meet the
    shortest one.
    """

    def __init__(self, signs: Path, seconds: float, checkpoints: Path, aimed: str | None) -> None:
        shutil.rmtree(signs, ignore_errors=True)
        signs.mkdir()
        self._signs, self._seconds = signs, seconds
        self._checkpoints, self._aimed = checkpoints, aimed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        files = [self._signs / f"pid-{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            if self._over.wait(0.002):
                return
        if not self._over.wait(self._seconds):
            latest = time.monotonic() + 3.0
            while self._aimed and phase_of(self._checkpoints) != self._aimed and time.monotonic() < latest:
                if self._over.wait(0.002):
                    return
            for file in files:
                os.kill(int(file.read_text()), signal.SIGKILL)


def phase_of(checkpoints: Path) -> str:
    """Returns the phase in which a checkpoint was interrupted, judged by the files that are left."""
    if list(checkpoints.glob(".*.old")):
        return "retiring"
    try:
        partial = [{path.name for path in folder.iterdir()} for folder in checkpoints.glob(".*.partial")]
    except FileNotFoundError:  # the folder was renamed during the look
        partial = []
    if not partial:
        return "training"
    if any(".metadata" in names for names in partial):
        return "committing"
    return "writing" if any(partial) else "copying"


def killed(config: dict[str, Any], signs: Path, seconds: float = 60.0, aimed: str | None = None) -> bool:
    """Resumes a run and returns whether it was killed before its end."""
    try:
        with Killer(signs, seconds, Path(config["train"]["output"]) / "checkpoints", aimed):
            run_ranks(train_slowly_written, 2, config, True, signs)
    except RankError as error:
        if "killed by SIGKILL" not in str(error):
            raise
        return True
    return False


def check_equal(run: Path, undisturbed: Path) -> None:
    """Asserts that both runs have the same losses of every step, the same checkpoints, and the same bits in them."""
    losses = [[record["loss"] for record in read_metrics(folder)] for folder in (run, undisturbed)]
    assert losses[0] == losses[1]
    kept = [list_checkpoints(folder, "step", "weights") for folder in (run, undisturbed)]
    assert [path.name for path in kept[0]] == [path.name for path in kept[1]]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {path.name for path in kept[0]}
    assert all(same(a, b) for a, b in zip(*kept))
    assert json.loads((kept[0][0] / "checkpoint.json").read_text())["progress"]["skipped"] == 0


def same(a: Path, b: Path) -> bool:
    """Returns whether two checkpoints of one layout hold the same bits in every slice."""
    ours, theirs = Reader.open(a), Reader.open(b)
    assert ours.stored.keys() == theirs.stored.keys()
    return all(
        torch.equal(ours.read(x), theirs.read(y))
        for key in ours.stored
        for x, y in zip(ours.stored[key], theirs.stored[key])
    )
