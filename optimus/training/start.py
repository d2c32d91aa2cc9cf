"""Fills the state of a run at its starting point: the first step, a checkpoint of another run, or the run's newest
intact checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus.checkpoint.folder import DamagedError, differences, find_checkpoint, read_description, step_of
from optimus.checkpoint.rollback import ResumePoint, resume_points
from optimus.checkpoint.slots import set_newer_aside
from optimus.checkpoint.store import load_state
from optimus.config.renamed import with_new_names
from optimus.errors import naming_disk_errors
from optimus.hub import omitted_layers
from optimus.plugins import changed_plugins
from optimus.training.beginning import begin, is_model_folder
from optimus.training.checkpointing import Origin, Start, restore_random
from optimus.training.loss_scale import first_loss_scale
from optimus.training.progress import Progress
from optimus.training.pruning import after_pruning
from optimus.training.run import Run

_DECIDING = (
    "data",
    "train",
    "optimizer",
    "lr_schedule",
    "moe",
    "pruning",
)  # sections with options that affect the numerical results of a run


def start_run(run: Run, resume: bool) -> Start:
    """Fills the state of `run`. All ranks must call this function.

    With `resume`, loads the newest intact checkpoint of `resume_points`, if the run has checkpoints. Raises
    `DamagedError` if all these checkpoints are damaged.
    """
    points = run.groups.world.on_first(lambda: resume_points(run.folder)) if resume else []
    return _resume(run, points) if points else _begin(run, resume)


def _resume(run: Run, points: Sequence[ResumePoint]) -> Start:
    """Loads the first intact checkpoint of `points`, and sets newer full checkpoints aside. Raises `DamagedError` if
    no checkpoint is intact."""
    notes = []
    for point in points:
        try:
            start, readers = _go_on(run, point.path, step_of(point.path), full=point.full)
            break
        except DamagedError as error:
            notes.append(str(error))
    else:
        raise DamagedError("; ".join(notes))
    how = "" if point.full else ", with its weights and fresh moments"
    notes.append(f"resumed from {point.path} (step {start.progress.step}){how}{_readers(run, readers)}")
    if run.groups.rank == 0:
        with naming_disk_errors(run.folder, "Correct the folder's permissions"):
            notes += [
                f"a newer checkpoint was set aside as {path}"
                for path in set_newer_aside(run.folder, start.progress.step)
            ]
    start.notes[:0] = notes
    return start


def _go_on(run: Run, path: Path, step: int, *, full: bool) -> tuple[Start, int]:
    """Loads the checkpoint `path` of step `step`. Without `full`, moments, counters and hooks start afresh.

    Returns (the run's `Start`, the number of ranks that read the checkpoint).
    """
    state, config = run.state, run.config
    description, readers = load_state(
        state,
        path,
        model=config.model,
        run=run.data.fingerprint(step, config.train.seed),
        full=full,
        send=config.checkpoint.broadcast,
    )
    progress = description.progress
    state.steps = progress["updates"] if full else 0
    state.counters = {name: progress.get(name, 0.0) if full else 0.0 for name in state.counters}
    state.pruned.unpruned, state.pruned.events = description.unpruned, description.prunings
    state.pruned.distances = progress.get("mask_distances", []) if full else []
    restore_random(description, run.device)
    run.data.load_streams(progress.get("streams", {}))
    origin = Origin(
        progress.get("began_with", config.checkpoint.load_path),
        description.context,
        description.published,
        description.chat,
    )
    same = path.parent == run.folder / "checkpoints" and (
        description.config.get("train", {}).get("freeze") == config.train.freeze
    )
    there, here = _numbers(with_new_names(description.config)), _numbers(run.resolved.record.model_dump(mode="json"))
    changed = differences(there, {key: value for key, value in here.items() if key in there})
    start = Start(
        Progress(
            run.resolved.phases,
            description.step,
            progress["skipped"],
            first_loss_scale(config, progress),
            progress.get("overflows", 0),
            progress.get("schedule_lag", 0),
        ),
        origin,
        progress.get("hooks", {}) if full else {},
        description.frozen if same else None,
        [
            *([f"continuing with another configuration: {changed}"] if changed else []),
            *changed_plugins(description.plugins, str(path)),
        ],
    )
    return start, readers


def _numbers(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the sections `_DECIDING`, by `section.key`.

    Excludes options that do not affect the numerical results of a run, and options that other code checks.
    """
    sections = {name: config.get(name) or {} for name in _DECIDING}
    elsewhere = [
        "data.path",
        "data.sources",
        "data.tokenizer",
        "train.output",
        "train.stop_at",
        "train.device",
        "train.data_cache",
        "moe.dispatch",
        "moe.drop_duplicates",
    ]
    if not config.get("model", {}).get("router_bias"):
        elsewhere.append("moe.bias_rate")
    flat = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {key: value for key, value in flat.items() if key not in elsewhere}


def _begin(run: Run, resume: bool) -> Start:
    config, world = run.config, run.groups.world
    notes = [f"nothing to resume in {run.folder}: starting at step 0"] if resume else []
    if (branch := config.lr_schedule.branch_from) is not None:
        path = world.on_first(lambda: find_checkpoint(branch))
        step = world.on_first(lambda: read_description(path).step)
        start, readers = _go_on(run, path, step, full=True)
        start.notes[:0] = [*notes, f"branching from {path} (step {start.progress.step}){_readers(run, readers)}"]
    else:
        initial = config.checkpoint.load_path
        pruned_further = config.pruning is not None and config.pruning.comes_first
        origin, readers = begin(run, initial, masks=not pruned_further)
        if initial is not None:
            notes.append(f"starting from the weights of {initial}{_readers(run, readers)}")
            if is_model_folder(initial):
                notes += filter(None, [world.on_first(lambda: omitted_layers(Path(initial), config.model))])
        start = Start(Progress(run.resolved.phases, loss_scale=first_loss_scale(config)), origin, notes=notes)
    if start.progress.step == 0 and config.pruning is not None and config.pruning.comes_first:
        start.notes.extend(after_pruning(run, 0, start.origin.began_with))
    return start


def _readers(run: Run, readers: int) -> str:
    size = run.groups.world.size
    return f", read by {readers} of {size} ranks" if size > 1 else ""
