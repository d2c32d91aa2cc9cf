"""Decides a run's number of steps, of warm-up steps and of cooldown steps.

This module must not import torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optimus.config import RunConfig
from optimus.config.combinations import check_combinations
from optimus.config.flat import flat
from optimus.config.load import check_value
from optimus.config.phases import phases_of
from optimus.config.renamed import with_new_names
from optimus.config.yaml_text import parse_yaml
from optimus.errors import UserError
from optimus.resolve.decision import Decided

_WARMUP = "lr_schedule.warmup_steps"
# A resumed run reads from its folder the values of these keys and the warm-up steps of the phases.
PERSISTENT = (_WARMUP, "train.precision", "train.micro_batch")


def length(config: RunConfig, sequences: int | None) -> Decided:
    """Decides the steps of a run whose length is given in tokens, or in epochs over `sequences` sequences.

    Decides nothing if `train.steps` is set. Raises `UserError` for epochs that give no valid number of steps, and for a
    run that ends before `train.stop_at`.
    """
    train, why = config.train, ""
    steps = train.steps
    if train.epochs is not None:
        steps, why = _steps_of_epochs(config, sequences), f"{train.epochs:g} passes over {sequences:,} sequences"
        _check(config.decided({"train.steps": steps, "train.epochs": None}), steps)
    elif steps is None:
        steps, why = train.total_steps, f"{train.tokens:,} tokens"
    if train.stop_at is not None and train.stop_at > steps:
        raise UserError(f"train.stop_at {train.stop_at} is beyond the {steps} steps of the run: lower it")
    return (
        Decided({"train.steps": steps, "train.tokens": None, "train.epochs": None}, why, persistent=True)
        if why
        else Decided()
    )


def _steps_of_epochs(config: RunConfig, sequences: int | None) -> int:
    train = config.train
    if config.data.sources:
        raise UserError(
            "train.epochs: with data.sources, each source has its own number of epochs: give train.steps or train.tokens"
        )
    if sequences is None and config.data.dataset is not None:
        raise UserError("train.epochs: a stream has no number of items: give train.steps or train.tokens instead")
    if sequences is None:
        raise UserError(
            "train.epochs: the number of steps depends on the data, which is missing here: give train.steps instead"
        )
    steps = int((train.epochs or 0) * sequences / train.global_batch + 1e-6)
    if not steps:
        raise UserError(
            f"train.epochs {train.epochs:g} of the {sequences:,} sequences in {config.data.path} is less than one step of "
            f"train.global_batch {train.global_batch}: raise train.epochs or lower train.global_batch"
        )
    return steps


def _check(config: RunConfig, steps: int) -> None:
    try:
        check_combinations(config)
    except ValueError as error:
        raise UserError(f"train.epochs gives {steps} steps: {error}") from None


def warmup(config: RunConfig, previous: Mapping[str, Any]) -> Decided:
    """Decides the warm-up steps of each learning-rate schedule that does not set `warmup_steps`.

    A value in `previous`, the result of `previous_decisions`, takes precedence.
    """
    values = {
        f"{path}.warmup_steps": each.warmup_steps
        for path, each in _schedules(config)
        if each.lr_schedule.warmup_steps is None
    }
    known = {key: previous[key] for key in values if key in previous}
    why = "as at the start of the run" if known else "a twentieth of the run, at most 2,500 steps"
    return Decided(values | known, why, persistent=True)


def cooldown(config: RunConfig) -> Decided:
    """Decides the cooldown steps of each `wsd` learning-rate schedule that does not set `cooldown_steps`."""
    values = {
        f"{path}.cooldown_steps": each.cooldown_steps
        for path, each in _schedules(config)
        if each.lr_schedule.name == "wsd" and each.lr_schedule.cooldown_steps is None
    }
    return Decided(values, "a fifth of the run")


def _schedules(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields the path of each learning-rate schedule of a run, and the configuration that uses the schedule."""
    yield "lr_schedule", config
    for number, phase in enumerate(phases_of(config) if config.phases else ()):
        if config.phases[number].lr_schedule is not None:
            yield f"phases.{number}.lr_schedule", phase.config


def previous_decisions(run: Path) -> dict[str, Any]:
    """Reads the decisions that a resumed run keeps, by key, from config.yaml in the run folder `run`.

    Returns an empty dict if the file cannot be read. Raises `UserError` for an invalid value.
    """
    path = run / "config.yaml"
    try:
        found = dict(flat(with_new_names(parse_yaml(path.read_text(encoding="utf-8"), str(path)))))
        for number, phase in enumerate(found.get("phases") or ()):
            found[f"phases.{number}.{_WARMUP}"] = dict(flat(phase)).get(_WARMUP)
    except (OSError, UnicodeDecodeError, UserError, LookupError, TypeError, AttributeError):
        return {}
    keys = (*PERSISTENT, *(key for key in found if key.startswith("phases.")))
    persistent = {key: found[key] for key in keys if found.get(key) is not None}
    for key, value in persistent.items():
        check_value(key, value, str(path))
    return persistent
