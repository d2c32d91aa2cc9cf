"""Scores the checkpoints of a training while it runs, each once, for `optimus evaluate --watch`."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimus.checkpoint.folder import list_checkpoints, step_of
from optimus.checkpoint.lease import living_holder
from optimus.config.load import load_config
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.evaluation.run import evaluate
from optimus.observe.evaluations import NewScores, scores_path
from optimus.observe.metrics import Sinks
from optimus.report.folder import read_folder

_EVERY = 5.0  # seconds between two looks at the run's folder


def watch(
    run: str | Path, *, name: str = "watch", every: float = _EVERY, **options: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Scores each checkpoint of `run` once, the newest first, and yields (step, result of `evaluate`). Ends when the
    training has finished and all its checkpoints are scored.

    The result of step N is in the run folder, in `evaluations/NAME-N.json`; a checkpoint with such a file is not scored
    again. `options` are those of `evaluate`. The training passes the scores to its metric sinks; after the training, this
    function does. Skips checkpoints that the training removes before they are scored. Raises `UserError` like `evaluate`.

    Example:
        for step, scores in api.watch("runs/first", text="held-out/"):
            print(step, scores["bits_per_byte"])
    """
    if re.fullmatch(r"\w[\w.-]*", name) is None:
        raise UserError(f"`name` is {name!r}: give the beginning of a file name: letters, digits, `_`, `-` and `.`")
    folder = user_path(run)
    while True:
        state, _ = read_folder(folder).state  # before the look at its checkpoints, so that none is missed
        waiting = [
            path for path in list_checkpoints(folder, "step", "weights") if not _scores(folder, name, path).exists()
        ]
        if waiting:
            path = waiting[-1]
            target = _scores(folder, name, path)
            target.parent.mkdir(exist_ok=True)
            try:
                yield step_of(path), evaluate(path, output=target, **options)
            except UserError:
                if path.exists():
                    raise
                print(f"{path} was removed before it was scored (checkpoint.keep)", file=sys.stderr)
        elif state == "finished":
            if living_holder(folder) is None:
                _deliver(folder)
            return
        else:
            time.sleep(every)


def _scores(folder: Path, name: str, checkpoint: Path) -> Path:
    return scores_path(folder, name, step_of(checkpoint))


def _deliver(folder: Path) -> None:
    """Writes scores that came after the end of the training to the run's metric sinks."""
    records = NewScores(folder).read()
    if records:
        sinks = Sinks(folder, load_config(folder / "config.yaml"), read_folder(folder).step)
        for record in records:
            sinks.write(record)
        sinks.close()
