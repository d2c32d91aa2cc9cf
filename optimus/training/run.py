"""A run: its configuration, model, state, data and counters, put together on one rank."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from optimus.checkpoint.saving import Saver
from optimus.comm import Group, Groups
from optimus.config import RunConfig
from optimus.config.phases import Phase, phase_at, tokens_after
from optimus.config.sizes import count_text
from optimus.data.loader import TokenBatch, TokenLoader
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.mesh import Layout
from optimus.mesh.placement import describe
from optimus.model import Batch, Transformer
from optimus.model.batch import pinned
from optimus.parallel.build import build_stage
from optimus.pipeline.staged import Staged, select_stages
from optimus.resolve.parameters import targets_of
from optimus.resolve.rules import with_factors
from optimus.resolve.run import ResolvedRun
from optimus.state.gathering import Gathering
from optimus.state.model_state import ModelState
from optimus.state.plan import unpruned_shares
from optimus.training.stages import stages_of
from optimus.training.summary import summarise, summary_lines
from optimus.training.teacher import load_teacher

T = TypeVar("T")
MasksOf = Callable[[Groups, Mapping[str, Layout], Transformer], Mapping[str, Tensor]]


@dataclass
class Run:
    """What the loop and its hooks work on."""

    resolved: ResolvedRun
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

    @property
    def config(self) -> RunConfig:
        """In which nothing is left open."""
        return self.resolved.config

    @property
    def phases(self) -> list[Phase]:
        """Those of the configuration; one where it has none."""
        return self.resolved.phases

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


def no_masks(groups: Groups, layouts: Mapping[str, Layout], model: Transformer) -> Mapping[str, Tensor]:
    """No parameter is pruned."""
    return {}


def build_model(
    resolved: ResolvedRun, groups: Groups, device: torch.device, masks_of: MasksOf = no_masks
) -> tuple[Staged, ModelState]:
    """The stages of the model on this rank, with this rank's parts of its parameters, and their state, without values yet.

    `masks_of` gives the packed bits of this rank's parts of parameters that are pruned, of those with such layouts and of
    the model that holds them whole, without memory. All ranks must call.
    """
    config, layouts, partition = resolved.widest, resolved.layouts, resolved.partition(groups.rank)
    here = {name: each for name, each in layouts.items() if partition.keeps(name, config.model.tie_embeddings)}
    masks = masks_of(groups, here, resolved.model)
    unpruned = dict.fromkeys(resolved.recipe.unpruned) | unpruned_shares(masks, here, groups.mesh, groups.rank)
    recipe = resolved.recipe._replace(unpruned=unpruned)
    groups.make(resolved.divisions(tags=groups.tags))  # those of all stages
    gathering = Gathering()
    with torch.device("meta"):
        model = build_stage(config.model, groups, resolved.options, gathering.gradient_buffers, gathering.unit)
        with_factors(model, config.train)
    trained = [name for name in layouts if recipe.rules[name].trains]
    partition = partition._replace(trained_from=partition.first_of(trained))
    select_stages(model, partition)
    state = ModelState(
        model,
        {name: layouts[name] for name, _ in model.named_parameters()},
        groups,
        config.state,
        recipe=recipe,
        masks=masks,
        device=device,
        gathering=gathering,
        divided=resolved.divided(groups.rank),
    )
    return stages_of(model, partition, config, groups, recipe.compute, device), state


def new_run(
    resolved: ResolvedRun, groups: Groups, device: torch.device, data: TrainingData, masks_of: MasksOf = no_masks
) -> Run:
    """A run on `device` whose state has no values yet, and whose notes say what it will do; all ranks must call.

    `masks_of` is as `build_model` has it.
    """
    config = resolved.config
    notes = summary_lines(summarise(resolved, data.instances))
    notes += [describe(groups.mesh)] if groups.world.size > 1 else []
    groups.choose_by(resolved.facts.collectives)
    model, state = build_model(resolved, groups, device, masks_of)
    notes += [*resolved.facts.notes, *filter(None, [_frozen_line(resolved)])]
    if (teacher := config.train.teacher) is not None:
        last = model.partition.has_last
        model.teacher = read_together(lambda: load_teacher(config, device) if last else None, groups.world)
        notes.append(f"train.teacher: {', '.join(teacher.checkpoints)}")
    notes += groups.notes
    targets = targets_of(config, resolved.model)
    return Run(resolved, Path(config.train.output), device, groups, model, state, data, targets, notes=notes)


def _frozen_line(resolved: ResolvedRun) -> str | None:
    """How many parameters are not trained, if there are some."""
    sizes = {name: math.prod(layout.shape) for name, layout in resolved.layouts.items()}
    frozen = sum(size for name, size in sizes.items() if not resolved.recipe.rules[name].trains)
    if not frozen:
        return None
    return f"train.freeze: {count_text(frozen)} of {count_text(sum(sizes.values()))} parameters are not trained"


def read_together(read: Callable[[], T], world: Group) -> T:
    """What `read` gives on this rank; what any rank finds wrong is raised on all of them."""
    try:
        found, failure = [read()], None
    except UserError as error:
        found, failure = [], error
    world.agree(failure)
    return found[0]
