"""Scores the checkpoints of a run during and after the training, for `optimus evaluate --watch`."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimus.checkpoint.folder import DESCRIPTION, list_checkpoints, step_of
from optimus.checkpoint.lease import living_holder
from optimus.config.load import load_config
from optimus.data.tokenizer import file_sha256
from optimus.disk import parse_json, user_path
from optimus.errors import UserError
from optimus.evaluation.run import check_request, evaluate
from optimus.observe.evaluations import NewScores, scores_path
from optimus.observe.metrics import Sinks
from optimus.report.folder import read_folder

_EVERY = 5.0  # seconds to wait if no checkpoint needs a score


def watch(
    run: str | Path, *, name: str = "watch", every: float = _EVERY, **options: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Scores the checkpoints of `run` that have no score yet, the newest first, and yields (step, result of
    `evaluate`). Prints a line for a checkpoint that `evaluate` cannot score. Ends when the training has finished and no
    checkpoint waits for a score. Prints a line when the training has stopped or failed before its end, and waits until
    the run is resumed.

    Writes the result of step N to `evaluations/NAME-N.json` in the run folder (N has at least eight digits). `options`
    are those of `evaluate`, except `output`. `every` is the number of seconds to wait if no checkpoint needs a score.

    Example:
        for step, scores in api.watch("runs/first", text="held-out/"):
            print(step, scores["bits_per_byte"])
    """
    if re.fullmatch(r"\w[\w.-]*", name) is None:
        raise UserError(f"`name` is {name!r}: give the beginning of a file name: letters, digits, `_`, `-` and `.`")
    about = "tasks", "task_data", "hub", "text", "limit", "fewshot", "max_bytes"
    check_request(**{key: value for key, value in options.items() if key in about})
    folder, passed_over, said = user_path(run), set[str](), ""
    read_folder(folder)  # raises `UserError` if the folder is not a run folder
    while True:
        trains = living_holder(folder) is not None  # read first: the run may save a checkpoint and end
        waiting = [
            path
            for path in {step_of(path): path for path in list_checkpoints(folder, "step", "weights")}.values()
            if path.name not in passed_over and not _is_scored(path, _scores(folder, name, path))
        ]
        if waiting:
            path = waiting[-1]
            target = _scores(folder, name, path)
            target.parent.mkdir(exist_ok=True)
            try:
                yield step_of(path), evaluate(path, output=target, **options)
            except UserError as error:
                passed_over.add(path.name)
                why = error if path.exists() else f"{path} was removed before it was scored (checkpoint.keep)"
                print(f"step {step_of(path)} has no score: {why}", file=sys.stderr)
            continue
        state, detail = ("running", "") if trains else read_folder(folder).state
        if state == "finished":
            _deliver(folder)
            return
        if state not in ("running", said):
            reason = f" ({detail})" if detail else ""
            print(f"{folder} has {state}{reason}: waiting until it is resumed and finishes", file=sys.stderr)
        said = state
        time.sleep(every)


def _scores(folder: Path, name: str, checkpoint: Path) -> Path:
    return scores_path(folder, name, step_of(checkpoint))


def _is_scored(checkpoint: Path, scores: Path) -> bool:
    """Returns True if the file `scores` has the scores of this checkpoint."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = parse_json(scores.read_bytes())
        return bool(found["checkpoint"]["sha256"] == file_sha256(checkpoint / DESCRIPTION))
    return False


def _deliver(folder: Path) -> None:
    """Writes the scores that the run's metric sinks do not have yet to these sinks."""
    scores = NewScores(folder)
    if records := scores.read():
        sinks = Sinks(folder, load_config(folder / "config.yaml"), read_folder(folder).step)
        for record in records:
            sinks.write(record)
        sinks.close()
    scores.note()
