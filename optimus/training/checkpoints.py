"""The checkpoints of a run: what a new or resumed run begins with, and the hook that writes them."""

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.checkpoint import folder
from optimus.checkpoint.folder import DamagedError, Description, step_of
from optimus.checkpoint.masks import masks_in
from optimus.checkpoint.rollback import ResumePoint, resume_points
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.slots import place_of_frozen, set_newer_aside
from optimus.checkpoint.store import load_state
from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.config.phases import longest, sequences_after
from optimus.config.renamed import with_new_names
from optimus.data.training import TrainingData, open_folders
from optimus.errors import naming_disk_errors
from optimus.hub import left_out
from optimus.mesh import Layout
from optimus.model import Transformer
from optimus.resolve.parameters import targets_of
from optimus.resolve.ranks import mesh_of, ranks_per_node
from optimus.state.pruning import weights_to_be
from optimus.training.beginning import begin, begins_anew, begins_with, first_weights, is_model_folder
from optimus.training.checks import check_memory
from optimus.training.collectives import partial_sums
from optimus.training.hooks import Hook
from optimus.training.pruning import after_pruning, choose_masks
from optimus.training.resolving import resolve_here
from optimus.training.run import Run, new_run, read_together
from optimus.training.step import StepResult

_DECIDING = ("data", "train", "optimizer", "lr_schedule", "moe", "pruning")  # sections, which numbers a run computes


def build_run(config: RunConfig, device: torch.device, resume: bool) -> Run:
    """Make model and state on `device`, initialised, or loaded from the newest checkpoint that is whole when `resume`."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = mesh_of(config, ranks, ranks_per_node(ranks))
    groups = Groups(mesh, config.resilience.timeout, [], partial_sums=partial_sums(config))
    folders = read_together(lambda: open_folders(config), groups.world)
    sequences = sum(shards.instances for shards in folders.values())
    resolved = resolve_here(config, device, groups, sequences=sequences, resume=resume)
    if device.type != "cpu":  # a program that starts ranks has not asked how much is free
        check_memory(resolved, device)
    config = resolved.config
    data = read_together(lambda: TrainingData(config, folders, resolved.phases), groups.world)
    run = new_run(resolved, groups, device, data, partial(_masks, config, device, resume))
    points = groups.world.on_first(lambda: resume_points(run.folder)) if resume else []
    if points:
        _resume(run, points)
    else:
        _start(run, resume)
        if run.step == 0 and config.pruning is not None and config.pruning.comes_first:
            after_pruning(run)
    return run


def _masks(
    config: RunConfig,
    device: torch.device,
    resume: bool,
    groups: Groups,
    layouts: Mapping[str, Layout],
    model: Transformer,
) -> Mapping[str, Tensor]:
    """Masks of what the run will begin with: so it never has state for what is pruned."""
    source = groups.world.on_first(lambda: begins_with(config, resume))
    masks = dict[str, Tensor]()
    if source is not None:
        found = source
        masks = read_together(lambda: masks_in(found, layouts, groups.mesh, groups.rank), groups.world)
    prunes = config.pruning is not None and config.pruning.comes_first
    if not (prunes and groups.world.on_first(lambda: begins_anew(config, resume))):
        return masks
    weights = weights_to_be(layouts, groups, device, first_weights(config, source, model), masks)
    return masks | choose_masks(weights, config, targets_of(config, model))


class Checkpoints(Hook):
    """Saves every so many steps, at the end and on an error; all ranks take part."""

    def before_training(self, run: Run) -> None:
        section = run.config.checkpoint
        self._saver = run.saver = Saver(run.state, scattered=section.scattered, beside=section.asynchronous)
        self._saved = run.step
        self._waited = 0.0

    def after_step(self, run: Run, result: StepResult) -> None:
        section = run.config.checkpoint
        ends = run.step == run.last_step or run.stopped_by > 0
        self._saver.poll()
        targets = []
        # Weights first: a run that is killed between the two goes on behind this step, and would never write them.
        if section.weights_every is not None and run.step % section.weights_every == 0:
            every = section.weights_every * section.weights_keep
            targets.append(Target(folder.weights_folder(run.folder, run.step), describe(run, full=False), every=every))
        if run.step % section.every == 0 or ends:
            targets += self._full(run)
        self._save(run, targets)
        if ends:
            self._saver.finish()
        run.checkpoint_seconds += self._saver.seconds - self._waited
        self._waited = self._saver.seconds

    def after_error(self, run: Run) -> None:
        self._saver.finish()
        if run.step > self._saved:
            self._save(run, self._full(run))
            self._saver.finish()

    def after_training(self, run: Run) -> None:
        if run.saver is not None:
            run.saver.abandon()

    def _full(self, run: Run) -> list[Target]:
        """A full checkpoint, behind what it refers to where that is not written yet."""
        frozen = []
        if run.config.train.freeze:
            self._saver.finish()
            run.frozen, complete = run.groups.world.on_first(lambda: place_of_frozen(run.folder, run.frozen))
            place = run.folder / "checkpoints" / run.frozen
            frozen = [] if complete else [Target(place, describe(run, full=False), frozen=True)]
        where = folder.step_folder(run.folder, run.step)
        return [*frozen, Target(where, describe(run, full=True), keep=run.config.checkpoint.keep)]

    def _save(self, run: Run, targets: list[Target]) -> None:
        if targets:
            self._saver.save(*targets)
        if any(target.description.full for target in targets):
            self._saved = run.step


def describe(run: Run, *, full: bool) -> Description:
    """The description of a checkpoint of `run` as it is now."""
    mesh, config, phase = run.groups.mesh, run.config, run.phase
    return Description(
        model=config.model,
        context=max(run.context, longest(run.phases[: phase.number + 1]).train.sequence_length),
        step=run.step,
        full=full,
        precision=config.train.precision,
        eos_id=run.data.first_folder.eos_id,
        tokenizer=run.data.first_folder.tokenizer_path,
        run=run.data.fingerprint(run.step, config.train.seed),
        progress={
            "updates": run.state.steps,
            **run.state.counters,
            "skipped": run.skipped,
            "sequences": sequences_after(run.phases, run.step),  # read of the data, the next one's number
            **({"phase": phase.name} if phase.name else {}),
            **({"began_with": run.began_with} if run.began_with else {}),
            **({"prunings": run.prunings} if run.config.pruning else {}),
            **({"unpruned": run.unpruned} if run.unpruned < 1 else {}),
            **({"mask_distances": run.mask_distances} if run.mask_distances else {}),
        },
        config=run.resolved.record.model_dump(mode="json"),
        random=_random_states(run.device),
        written={
            "ranks": mesh.size,
            "ranks_per_node": mesh.ranks_per_node or mesh.size,
            "scattered": config.checkpoint.scattered,
        },
        published=run.published,
        frozen=run.frozen if full else None,
    )


def _resume(run: Run, points: Sequence[ResumePoint]) -> None:
    """Load the first of `points`, the newest first, that is whole; what is newer is set aside."""
    notes = []
    for point in points:
        try:
            readers = _go_on(run, point.path, step_of(point.path), full=point.full)
            break
        except DamagedError as error:
            notes.append(str(error))
    else:
        raise DamagedError("; ".join(notes))
    how = "" if point.full else ", its weights with fresh moments"
    run.notes += [*notes, f"resumed from {point.path} (step {run.step}){how}{_readers(run, readers)}"]
    if run.groups.rank == 0:
        with naming_disk_errors(run.folder, "Mend the folder's permissions"):
            run.notes += [f"set aside as {path}" for path in set_newer_aside(run.folder, run.step)]


def _go_on(run: Run, path: Path, step: int, *, full: bool) -> int:
    """Load state and counters from checkpoint `path`, after `step`, of this run or of one of the same data.

    Returns how many ranks have read it.
    """
    description, readers = load_state(
        run.state,
        path,
        model=run.config.model,
        run=run.data.fingerprint(step, run.config.train.seed),
        full=full,
        send=run.config.checkpoint.broadcast,
    )
    run.step, progress = description.step, description.progress
    run.context, run.published = description.context, description.published
    run.state.steps = progress["updates"] if full else 0
    run.state.counters = {name: progress.get(name, 0.0) if full else 0.0 for name in run.state.counters}
    run.skipped, run.unpruned, run.prunings = progress["skipped"], description.unpruned, description.prunings
    run.began_with = progress.get("began_with", run.config.checkpoint.initial)
    run.mask_distances = progress.get("mask_distances", []) if full else []
    if (
        path.parent == run.folder / "checkpoints"
        and description.config.get("train", {}).get("freeze") == run.config.train.freeze
    ):
        run.frozen = description.frozen
    _restore_random(description, run.device)
    there, here = _numbers(with_new_names(description.config)), _numbers(run.resolved.record.model_dump(mode="json"))
    if changed := folder.differences(there, {key: value for key, value in here.items() if key in there}):
        run.notes.append(f"going on with another configuration: {changed}")
    return readers


def _numbers(config: dict[str, Any]) -> dict[str, Any]:
    """By `section.key`, what of a configuration decides which numbers a run computes."""
    sections = {name: config.get(name) or {} for name in _DECIDING}
    elsewhere = [
        "data.path",
        "data.sources",
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


def _start(run: Run, resume: bool) -> None:
    initial = run.config.checkpoint.initial
    if resume:
        run.notes.append(f"nothing to resume in {run.folder}: starting at step 0")
    if (branch := run.config.lr_schedule.branch_from) is not None:
        path = run.groups.world.on_first(lambda: folder.find_checkpoint(branch))
        step = run.groups.world.on_first(lambda: folder.read_description(path).step)
        readers = _go_on(run, path, step, full=True)
        run.notes.append(f"branching from {path} (step {run.step}){_readers(run, readers)}")
        return
    run.began_with = initial
    pruned_further = run.config.pruning is not None and run.config.pruning.comes_first
    readers = begin(run, masks=not pruned_further)
    if initial is not None:
        run.notes.append(f"starting from the weights of {initial}{_readers(run, readers)}")
        if is_model_folder(initial):
            run.notes += filter(None, [run.groups.world.on_first(lambda: left_out(Path(initial)))])


def _readers(run: Run, readers: int) -> str:
    size = run.groups.world.size
    return f", read by {readers} of {size} ranks" if size > 1 else ""


def _random_states(device: torch.device) -> dict[str, str]:
    """States of rank 0's generators. Nothing here draws from them; a user's code in the model may, on all ranks alike."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {kind: base64.b64encode(bytes(state.tolist())).decode() for kind, state in states.items()}


def _restore_random(description: Description, device: torch.device) -> None:
    """Go on with the generators as they were; one of a type of device that is not here stays as it is."""
    for kind, text in description.random.items():
        state = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif kind == device.type:
            torch.get_device_module(device).set_rng_state(state, device)
