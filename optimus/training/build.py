"""Builds the process groups, data, model, state and trainer of a run on one rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.checkpoint.masks import masks_in
from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.config.sizes import count_text
from optimus.data.training import TrainingData, open_sources, sequences_in
from optimus.mesh import Layout
from optimus.mesh.placement import describe
from optimus.model import CausalModel
from optimus.parallel.parallelize import parallelize
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.parameters import targets_of
from optimus.resolve.ranks import mesh_of, ranks_per_node
from optimus.resolve.run import RankPlan, ResolvedRun
from optimus.state.gathering import ParameterPrefetcher
from optimus.state.model_state import ModelState
from optimus.state.pruning import weights_to_be
from optimus.training.beginning import begins_anew, begins_with, first_weights
from optimus.training.checks import check_memory
from optimus.training.collectives import partial_sums
from optimus.training.hooks.chosen import hooks_of
from optimus.training.hooks.users import users_hooks
from optimus.training.objects import NO_OBJECTS, UserObjects
from optimus.training.pruning import choose_masks
from optimus.training.resolving import resolve_run
from optimus.training.run import Run, read_together
from optimus.training.stages import stages_of
from optimus.training.start import start_run
from optimus.training.summary import summarise, summary_lines
from optimus.training.teacher import load_teacher
from optimus.training.trainer import Hook, Trainer

MasksOf = Callable[[Groups, Mapping[str, Layout], CausalModel], Mapping[str, Tensor]]


def build_trainer(
    config: RunConfig,
    device: torch.device,
    resume: bool,
    *,
    node: str | None = None,
    holder: str | None = None,
    more: Sequence[Hook] = (),
    users: UserObjects = NO_OBJECTS,
) -> Trainer:
    """Builds the trainer of `config` on this rank, ready for the next step. With `resume`, the run continues from its
    newest intact checkpoint, if the run has checkpoints.

    All ranks must call this function.
    """
    run = build_run(config, device, resume, users.data)
    hooks = [*more, *hooks_of(run, node, holder), *users_hooks(config.train.hooks, users.hooks, run.groups.rank)]
    return Trainer(run, start_run(run, resume), hooks)


def build_run(config: RunConfig, device: torch.device, resume: bool, dataset: Any = None) -> Run:
    """Builds this rank's run. Only the masks of the run's state are initialised. All ranks must call this function."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = mesh_of(config, ranks, ranks_per_node(ranks))
    groups = Groups(mesh, config.resilience.timeout, [], partial_sums=partial_sums(config))
    sources = read_together(lambda: open_sources(config, dataset), groups.world)
    sequences = sequences_in(sources, config.train.sequence_length)
    resolved = resolve_run(config, device, groups, sequences=sequences, resume=resume)
    if device.type != "cpu":
        check_memory(resolved, device)
    config = resolved.config
    data = read_together(lambda: TrainingData(config, sources, resolved.phases), groups.world)
    groups.choose_by(resolved.facts.collectives)
    plan = resolved.on_rank(groups.rank, tags=groups.tags)
    model, state = build_model(plan, groups, device, partial(_masks, config, device, resume))
    if config.train.teacher is not None:
        last = model.partition.has_last
        model.teacher = read_together(lambda: load_teacher(config, device) if last else None, groups.world)
    notes = _notes(resolved, groups, data)
    return Run(resolved, device, groups, model, state, data, targets_of(config, resolved.model), notes)


def _masks(
    config: RunConfig,
    device: torch.device,
    resume: bool,
    groups: Groups,
    layouts: Mapping[str, Layout],
    model: CausalModel,
) -> Mapping[str, Tensor]:
    """Returns the masks of the weights that will fill the state."""
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


def build_model(
    plan: RankPlan, groups: Groups, device: torch.device, masks_of: MasksOf = lambda *_: {}
) -> tuple[PipelineStages, ModelState]:
    """Builds the model's stages on this rank, and the uninitialised state with this rank's shards of the parameters.

    `masks_of` takes the groups, the layouts and the unsharded model on the meta device. For each pruned parameter,
    `masks_of` returns, by name, packed bits for this rank's slice. All ranks must call this function.
    """
    groups.make(plan.groups)  # on all ranks in the same order
    masks, gathering = masks_of(groups, plan.layouts, plan.model), ParameterPrefetcher()
    model = deepcopy(plan.model)
    staged = stages_of(model, plan.partition, plan.config, groups, plan.state_spec.compute, device)
    state = ModelState(
        model,
        plan.layouts,
        groups,
        plan.config.state,
        plan.divided,
        spec=plan.state_spec,
        masks=masks,
        device=device,
        gathering=gathering,
    )
    rows = [stage.row for stage in staged.stages.values()]
    parallelize(model, groups, plan.options, gathering.gradient_buffers, gathering.unit, rows)
    return staged, state


def _notes(resolved: ResolvedRun, groups: Groups, data: TrainingData) -> list[str]:
    teacher = resolved.config.train.teacher
    return [
        *summary_lines(summarise(resolved, data.sequences)),
        *([describe(groups.mesh)] if groups.world.size > 1 and resolved.config.observe.verbose else []),
        *resolved.facts.notes,
        *resolved.model.notes,
        *filter(None, [_frozen_line(resolved)]),
        *([f"train.teacher: {', '.join(teacher.checkpoints)}"] if teacher is not None else []),
        *groups.notes,
    ]


def _frozen_line(resolved: ResolvedRun) -> str | None:
    sizes = {name: math.prod(layout.shape) for name, layout in resolved.layouts.items()}
    frozen = sum(size for name, size in sizes.items() if not resolved.state_spec.rules[name].trains)
    if not frozen:
        return None
    return f"train.freeze: {count_text(frozen)} of {count_text(sum(sizes.values()))} parameters are not trained"
