"""From what a user says to a question for the planner."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from optimus.config import RunConfig, load_config
from optimus.errors import UserError
from optimus.hub import read_model_folder
from optimus.plan.machine import load_machine, machine_names
from optimus.plan.own import PRECISION, sections_of, setting_of
from optimus.plan.report import planned
from optimus.plan.search import Question, search
from optimus.plan.setting import Setting
from optimus.plan.what_if import changed
from optimus.train.pipeline import with_microbatches

_SEQUENCES, _PER_RANK = 1024, 4  # of a batch where none is given: the paper's, or more so that many ranks have work


def configured(model: str, overrides: Iterable[str], ranks: int) -> RunConfig:
    """The run that `model` names: a YAML file, or a preset or folder with the defaults of a run around it."""
    if ranks < 1:
        raise UserError("--ranks is missing: say how many ranks the job has")
    if Path(model).suffix in (".yaml", ".yml"):
        return with_microbatches(load_config(model, overrides, read_model_folder), ranks)
    batch = _SEQUENCES if ranks <= _SEQUENCES // _PER_RANK else _PER_RANK * ranks
    raw: dict[str, Any] = {
        "model": model,
        "data": {"path": "data"},
        "train": {"output": "run", "steps": 10_000, "global_batch": batch, "micro_batch": 1, "context": 4096},
    }
    return with_microbatches(load_config(raw, overrides, read_model_folder), ranks)


def asked(
    config: RunConfig, machine: str, ranks: int, changes: Iterable[str], imbalance: float
) -> tuple[Question, Callable[[], Setting]]:
    """The question, and what gives the layout as it is configured. Raises `UserError` for an unknown machine."""
    if not machine:
        raise UserError(f"--machine is missing: name one of {', '.join(machine_names())}, or a file")
    kind = changed(load_machine(machine), changes)
    train = config.train
    question = Question(
        config.model, kind, ranks, train.global_batch, train.context, PRECISION[train.precision], imbalance
    )
    return question, lambda: setting_of(config, ranks, min(ranks, kind.ranks_per_node), imbalance)


def best_layout(config: str | Path, overrides: Iterable[str], machine: str, ranks: int | None) -> RunConfig:
    """`config` with the layout that is fastest on `machine` for these ranks: under a launcher, those that it has started.

    Raises `UserError` where the number of ranks is not known, or nothing fits.
    """
    number = int(os.environ.get("WORLD_SIZE", ranks or 0))
    if not number:
        raise UserError("--auto-plan divides ranks: say how many with --ranks, or start them with a launcher")
    run = configured(str(config), overrides, number)
    question, _ = asked(run, machine, number, [], 1.0)
    best = search(question, best=1)[0]
    if int(os.environ.get("RANK", "0")) == 0:
        parts = ", ".join(f"{name} {value}" for name, value in sections_of(best.setting)["parallel"].items())
        print(f"planned for {question.machine.name}: {parts}; a step takes {best.step.seconds:.3g} s", file=sys.stderr)
    return planned(best, run)
