"""A run: its configuration, model, state, data and counters, put together on one rank."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.checkpoint.saving import Saver
from optimus.comm import Group, Groups
from optimus.config import RunConfig
from optimus.config.phases import Phase, longest, phase_at, phases_of, tokens_after
from optimus.config.sizes import count_text
from optimus.data.loader import TokenBatch, TokenLoader
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.mesh.placement import describe
from optimus.model import Batch, Transformer
from optimus.model.batch import pinned
from optimus.observe.machine import free_memory, measurements_of
from optimus.parallel.build import build_stage
from optimus.parallel.layouts import parameter_layouts
from optimus.pipeline.staged import Staged, select_stages
from optimus.state.gathering import Gathering
from optimus.state.model_state import ModelState
from optimus.state.plan import ChunkPlan, Recipe, bytes_by_kind, check_shard_ranks, plan_stages, unpruned_shares
from optimus.state.pruning import check_blocks
from optimus.train.collectives import measured_collectives, partial_sums, with_dispatcher
from optimus.train.groups import run_divisions
from optimus.train.pipeline import partition_of, placement_of, stages_of, tied_embeddings
from optimus.train.precision import DTYPES, with_precision
from optimus.train.recomputation import find_recomputation, stage_options
from optimus.train.residency import with_residency
from optimus.train.rules import check_prunable, pruned_by, rules_of, with_factors
from optimus.train.summary import summarise, summary_lines
from optimus.train.teacher import load_teacher, teacher_bytes

T = TypeVar("T")
MasksOf = Callable[[Groups, Mapping[str, Layout], Transformer], Mapping[str, Tensor]]


@dataclass
class Run:
    """What the loop and its hooks work on."""

    config: RunConfig
    folder: Path
    device: torch.device
    groups: Groups
    model: Staged
    state: ModelState
    data: TrainingData
    targets: Mapping[str, int] = field(default_factory=dict)  # elements of the parameters of the model that are pruned
    step: int = 0  # steps completed
    skipped: int = 0  # of them, without an update
    began_with: str | None = None  # the checkpoint or folder whose weights it had before its first step, if any
    prunings: int = 0  # how often it has pruned
    unpruned: float = 1.0  # share of the pruned parameters that is left
    # Of the last masks that were drawn, for an early-bird ticket.
    mask_distances: list[float] = field(default_factory=list)
    step_seconds: float = 0.0  # of the last step, waiting for data included
    waited_seconds: float = 0.0  # of them, in collectives, waiting for other ranks
    waited_by_kind: dict[str, float] = field(default_factory=dict)  # the same by kind of collective
    data_seconds: float = 0.0  # of them, waiting for data
    stopped_by: int = 0  # the signal that ends the run after this step; the same on every rank
    saver: Saver | None = None  # of its checkpoints, while it trains
    context: int = 0  # the longest sequences that the model had been trained on when it began
    published: dict[str, Any] = field(default_factory=dict)  # what was said of that model; hub/published.py
    frozen: str | None = None  # the folder that has its frozen parameters, since a checkpoint has referred to it
    loss_limit: float = math.inf  # above which the next step's update is left out
    checkpoint_seconds: float = 0.0  # since the last record of metrics, waiting for checkpoints
    failure: UserError | None = None  # what ends the run; set on every rank alike
    measured: dict[str, float] = field(default_factory=dict)  # by hooks after this step, for its record of metrics
    expert_load: dict[int, list[float]] | None = None  # by layer, of this step: tokens of each expert, to the mean
    notes: list[str] = field(default_factory=list)  # what the user should read next

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.config.train.stop_at or self.config.train.total_steps

    @property
    def tokens(self) -> int:
        """Tokens read by all completed steps."""
        return tokens_after(self.phases, self.step)

    @cached_property
    def phases(self) -> list[Phase]:
        """Those of the configuration; one where it has none."""
        return phases_of(self.config)

    @property
    def phase(self) -> Phase:
        """That of the last completed step; before the first step, the first one."""
        return phase_at(self.phases, self.step)

    @property
    def forward_is_collective(self) -> bool:
        """Whether all ranks must run a forward pass together: some of what it needs is on other ranks."""
        mesh = self.groups.mesh
        return self.state.gathers_on_use or mesh.pp * mesh.ep * mesh.tp * mesh.cp > 1

    def batches(self) -> TokenLoader[Batch]:
        """This rank's part of every global batch from the next step on, on the host."""
        data = self.groups.along("dp")
        return TokenLoader(
            self.data.phases,
            rank=data.rank,
            ranks=data.size,
            start_step=self.step,
            seed=self.config.train.seed,
            prepare=partial(_host_batch, on_device=self.device.type != "cpu"),
        )


def _host_batch(batch: TokenBatch, on_device: bool) -> Batch:
    """As tensors, in memory that a device reads without anybody waiting; borders of documents are read on the host."""
    tokens_BS, mask_BS, document_BS, source_B = (None if each is None else torch.from_numpy(each) for each in batch)
    if on_device:
        tokens_BS, mask_BS, source_B = (
            None if each is None else pinned(each) for each in (tokens_BS, mask_BS, source_B)
        )
    assert tokens_BS is not None
    return Batch(tokens_BS, mask_BS, document_BS, source_B)


def ranks_per_node(ranks: int) -> int:
    """As the launcher says; of `ranks` ranks, all on this machine where there is none yet."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def mesh_of(config: RunConfig, ranks: int, ranks_per_node: int | None = None) -> Mesh:
    """The mesh of `ranks` ranks as configured. Raises `UserError` when the sizes do not fit."""
    parallel = config.parallel
    return Mesh.of(
        ranks,
        pipeline=parallel.pipeline,
        data=None if parallel.data == "auto" else parallel.data,
        context=parallel.context,
        tensor=parallel.grid,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        ranks_per_node=ranks_per_node,
        pipeline_stride=parallel.pipeline_stride,
    )


def layouts_of(model: Transformer, config: RunConfig) -> dict[str, Layout]:
    """The layouts of the parameters of `model`, which holds them whole."""
    return parameter_layouts(
        model,
        sequence=config.parallel.splits_sequence,
        duplicates=not config.moe.drop_duplicates,
        tied_embeddings=tied_embeddings(config),
        vocabulary=config.parallel.vocabulary,
    )


def whole_model(config: RunConfig) -> Transformer:
    """The model with all its stages, without memory for its parameters."""
    with torch.device("meta"):
        return with_factors(Transformer(config.model, config.moe.routing), config.train)


def sharers(mesh: Mesh, device: torch.device) -> int:
    """Ranks that take their memory from that of `device`: on a CPU, or an accelerator that they share, all of a node."""
    shared = device.type == "cpu" or (dist.is_initialized() and dist.get_backend() == "gloo")
    return min(mesh.size, mesh.ranks_per_node or mesh.size) if shared else 1


def recipe_of(config: RunConfig, model: Transformer, unpruned: Mapping[str, float] | None = None) -> Recipe:
    """What the run keeps of the parameters of `model`, which holds them whole, when it begins with these shares of
    parameters `unpruned`. Raises `UserError` for such as cannot be pruned."""
    rules = rules_of(config.optimizer, model, config.train.freeze)
    targets = pruned_by(config.pruning, model, rules, tied=config.model.tie_embeddings)
    check_prunable("what the run begins with is pruned", unpruned or (), rules)
    form = config.pruning.indices if config.pruning is not None else "int32"
    return Recipe(DTYPES[config.train.precision], rules, dict.fromkeys(targets) | dict(unpruned or {}), form)


def targets_of(config: RunConfig, model: Transformer) -> dict[str, int]:
    """The parameters of `model`, which holds them whole, that are pruned, and their elements."""
    return {name: model.get_parameter(name).numel() for name in recipe_of(config, model).unpruned}


def unpruned_in_the_end(config: RunConfig) -> dict[str, float]:
    """Of each parameter that will be pruned the share that is left."""
    left = 1.0 if config.pruning is None else 1 - config.pruning.sparsity
    return dict.fromkeys(recipe_of(config, whole_model(config)).unpruned, left)


def planned_chunks(
    config: RunConfig, mesh: Mesh, ranks: Sequence[int], unpruned: Mapping[str, float] | None = None
) -> list[list[ChunkPlan]]:
    """The chunks that `build_model` makes on each of `ranks`, of its stages alone; without memory or a process group.

    `unpruned` are the shares that are left of pruned parameters. Raises `UserError` when the parameters cannot be divided
    as configured.
    """
    model = whole_model(config)
    return _planned_chunks(config, mesh, ranks, layouts_of(model, config), recipe_of(config, model, unpruned))


def _planned_chunks(
    config: RunConfig, mesh: Mesh, ranks: Sequence[int], layouts: Mapping[str, Layout], recipe: Recipe
) -> list[list[ChunkPlan]]:
    check_shard_ranks(layouts, mesh, config.state)
    partition, place = partition_of(config, mesh, ranks[0]), placement_of(config)

    def of(rank: int) -> list[ChunkPlan]:
        own = partition._replace(here=place.stages_of(mesh.coordinate(rank, "pp")))
        here = {name: each for name, each in layouts.items() if own.keeps(name, config.model.tie_embeddings)}
        stages = plan_stages(here, mesh, rank, config.state, own.stage_here, recipe)
        return [plan for plans in stages.values() for plan in plans]

    return list(map(of, ranks))


def no_masks(groups: Groups, layouts: Mapping[str, Layout], model: Transformer) -> Mapping[str, Tensor]:
    """No parameter is pruned."""
    return {}


def build_model(
    config: RunConfig,
    device: torch.device,
    groups: Groups,
    notes: list[str] | None = None,
    masks_of: MasksOf = no_masks,
) -> tuple[Staged, ModelState]:
    """The stages of the model on this rank, with this rank's parts of its parameters, and their state, without values yet.

    `masks_of` gives the packed bits of this rank's parts of parameters that are pruned, of those with such layouts and of
    the model that holds them whole, without memory. What has been chosen for the user is added to `notes`. All ranks must
    call. Raises `UserError` when the parameters cannot be divided as configured, or their activations do not fit the
    budget.
    """
    free, counted = _memory_to_count_on(config, groups, device)
    compute = DTYPES[config.train.precision]
    left_open, config = config.moe.dispatch == "auto", with_dispatcher(config, groups.mesh, groups.measured)
    whole = whole_model(config)
    layouts = layouts_of(whole, config)
    partition, tied = partition_of(config, groups.mesh, groups.rank), config.model.tie_embeddings
    free -= teacher_bytes(config) if partition.has_last else 0
    here = {name: each for name, each in layouts.items() if partition.keeps(name, tied)}
    masks = masks_of(groups, here, whole)
    recipe = recipe_of(config, whole, unpruned_shares(masks, here, groups.mesh, groups.rank))
    if config.pruning is not None and config.pruning.scope.startswith("block"):
        check_blocks({name: layouts[name] for name in recipe.unpruned}, groups.mesh)
    config, said = with_residency(
        config, groups, device, free, lambda each: _planned_chunks(each, groups.mesh, [groups.rank], layouts, recipe)[0]
    )
    (plans,) = _planned_chunks(config, groups.mesh, [groups.rank], layouts, recipe)
    groups.make(run_divisions(config, groups.mesh, layouts, tags=groups.tags))  # those of all stages
    free -= sum(bytes_by_kind(plans).values())
    chosen, note = find_recomputation(config, groups, compute.itemsize, free)
    gathering = Gathering()
    with torch.device("meta"):
        model = build_stage(
            config.model, groups, stage_options(config, chosen), gathering.gradient_buffers, gathering.unit
        )
        with_factors(model, config.train)
    partition = partition_of(config, groups.mesh, groups.rank)
    trained = [name for name in layouts if recipe.rules[name].trains]
    if notes is not None:
        notes += [*counted, *(each for each in (note, said) if each)]
        notes += [f"moe.dispatch: {config.moe.dispatch} (auto: its collectives take less time)"] if left_open else []
        notes += [_frozen_line(layouts, trained)] if len(trained) < len(layouts) else []
    partition = partition._replace(trained_from=partition.first_of(trained))
    select_stages(model, partition)
    layouts = {name: layouts[name] for name, _ in model.named_parameters()}
    state = ModelState(
        model,
        layouts,
        groups,
        config.state,
        recipe=recipe,
        masks=masks,
        device=device,
        gathering=gathering,
        stage_of=partition.stage_here,
    )
    return stages_of(model, partition, config, groups, compute, device), state


def _memory_to_count_on(config: RunConfig, groups: Groups, device: torch.device) -> tuple[int, list[str]]:
    """(bytes of the device that this rank may fill with what is left open, what the user should know about it).

    The least that is free on the device of any rank, and no number of the moment: in coarse steps, as it was counted
    before. All ranks must call, and find the same. 0 where nothing depends on it.
    """
    fits = config.recompute == ["auto"] and config.recompute_budget is None
    if not fits and config.state.residency == "device" and config.state.cache != "auto":
        return 0, []
    free = min(groups.world.all_gather_object(free_memory(device)))
    known = measurements_of(device, config.tuning.cache)
    counted = groups.world.on_first(lambda: known.free_memory(str(device), free))
    said = f"memory: {counted / 2**30:.2f} GiB are counted on, of {free / 2**30:.2f} GiB free"
    return counted // sharers(groups.mesh, device), [said, *known.notes]


def _frozen_line(layouts: Mapping[str, Layout], trained: Sequence[str]) -> str:
    sizes = {name: math.prod(layout.shape) for name, layout in layouts.items()}
    total = sum(sizes.values())
    frozen = total - sum(sizes[name] for name in trained)
    return f"train.freeze: {count_text(frozen)} of {count_text(total)} parameters are not trained"


def new_run(config: RunConfig, device: torch.device, resume: bool, masks_of: MasksOf = no_masks) -> Run:
    """A run on `device` whose state has no values yet, and whose notes say what it will do; all ranks must call.

    `masks_of` is as `build_model` has it.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    per_node, sums = ranks_per_node(ranks), partial_sums(config)
    groups = Groups(mesh_of(config, ranks, per_node), config.resilience.timeout, [], partial_sums=sums)
    data = read_together(lambda: TrainingData(config), groups.world)
    config, why = with_precision(config, device, resume, groups.world)
    notes = summary_lines(summarise(config, groups.mesh, data.instances), why)
    notes += [describe(groups.mesh)] if ranks > 1 else []
    measured, said = measured_collectives(config, per_node, resume, groups.world)
    groups.choose_by(measured)
    model, state = build_model(longest(phases_of(config)), device, groups, notes, masks_of)
    if (teacher := config.train.teacher) is not None:
        last = model.partition.has_last
        model.teacher = read_together(lambda: load_teacher(config, device) if last else None, groups.world)
        notes.append(f"train.teacher: {', '.join(teacher.checkpoints)}")
    notes += said + groups.notes
    targets = targets_of(config, whole_model(config))
    return Run(config, Path(config.train.output), device, groups, model, state, data, targets, notes=notes)


def read_together(read: Callable[[], T], world: Group) -> T:
    """What `read` gives on this rank; what any rank finds wrong is raised on all of them."""
    try:
        found, failure = [read()], None
    except UserError as error:
        found, failure = [], error
    world.agree(failure)
    return found[0]
