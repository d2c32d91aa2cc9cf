"""All chunks of a model: what the training step calls."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from optimus.comm import Group, Groups
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.kernels.square_sum import square_dtype
from optimus.mesh import Layout
from optimus.model.parameters import Role, declarations
from optimus.optim.rule import OptimizerStep
from optimus.state.buffers import RESIDENCES
from optimus.state.chunk import Chunk, TrainedChunk
from optimus.state.disk import StateFile
from optimus.state.gathering import Gathering
from optimus.state.masks import packed_bits
from optimus.state.matrices import OverBlocks
from optimus.state.placement import ChunkContext
from optimus.state.plan import ChunkPlan, Recipe, divisions, place_chunks, sharding_of, unpruned_shares
from optimus.state.reduction import GradientReduction
from optimus.state.transfers import Transfers, transfers

_REDUCING = 2  # chunks whose long gradient buffers may be on their way to the other ranks at once, or to the host


@dataclass
class PruningProgress:
    """How far the pruning of a model is."""

    events: int = 0
    """How often it has been pruned."""
    unpruned: float = 1.0
    """The share of the pruned parameters that is left."""
    distances: list[float] = field(default_factory=list)
    """Between the last masks that were drawn, each to the one before, for an early-bird ticket."""


class ModelState:
    """Takes over the parameters of `module` (usually made on the meta device) and keeps their whole state in chunks.

    `layouts` says of each parameter, by name, how it lies on the mesh of `groups`; `masks` are packed bits of this rank's
    parts of those that are pruned. After this, `module`'s parameters are views into the chunks, of this rank's parts; their
    values are zero until `initialize` or `load_slices`. `divided` are the chunks of each stage of a pipeline, as
    `state.plan.divide_stages` has them. `gathering` is what the parts of `module` were made
    with; without it, parameters must not be sharded, and autograd accumulates all gradients.

    Raises `UserError` where a parameter has been frozen by hand.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        groups: Groups,
        options: StateConfig,
        divided: Mapping[int, Sequence[ChunkPlan]],
        *,
        recipe: Recipe,
        masks: Mapping[str, Tensor] | None = None,
        device: torch.device,
        gathering: Gathering | None = None,
        moves: Transfers | None = None,
    ) -> None:
        _check_trainable((name, each.requires_grad) for name, each in module.named_parameters())
        self.groups, self.options, self.rules = groups, options, recipe.rules
        self._module, self.tile, self._layouts = module, options.tile, layouts
        self.recipe, self._frozen_masks = self._pruned_by(masks or {}, recipe)
        self.steps = 0  # optimizer steps applied
        self.drawn: Mapping[str, Tensor] | None = None  # masks by which it may be pruned next
        self.pruned = PruningProgress()
        self._unlike = set(recipe.rules.values())  # of all stages
        self.counters = {name: 0.0 for rule in self._unlike for name in rule.counters}
        self._reducing = dict[GradientReduction, None]()  # in the order in which their last reductions began
        self._leaving: deque[GradientReduction] = deque()
        self._divided = divided
        self._of_stage = self._make_chunks(masks or {}, moves or transfers(device))
        self.chunks = [chunk for chunks in self._of_stage.values() for chunk in chunks]
        self.trained = _trained(self.chunks)
        self.buffers = _place_buffers(module, device)  # trained by rules of their own; whole on all ranks of `team`
        # Else every rank has every gradient, and finds the same norm by itself.
        self._parted = any(chunk.plan.replica_count < groups.world.size for chunk in self.chunks)
        self._gathering = gathering or Gathering()
        self._hold()

    def _make_chunks(self, masks: Mapping[str, Tensor], moves: Transfers) -> dict[int, list[Chunk]]:
        """The chunks of each stage, whose parameters replace those of the module."""
        options, groups, stages = self.options, self.groups, self._plans()
        file = StateFile(Path(options.disk or "."), moves) if "disk" in RESIDENCES[options.offload] else None
        cached = [plan for plans in stages.values() for plan in plans if plan.lifetime == "cache"]
        block = max((plan.block for plan in cached), default=0)
        common = ChunkContext(
            groups=[],
            copies=groups.world,
            transfers=moves,
            step=groups.step,
            file=file,
            block=block,
            options=options,
            started=self._limit_reductions,
        )
        known: dict[tuple[tuple[str, ...], bool], list[Group]] = {}  # to divide thousands of ranks takes long
        parameters = dict[str, nn.Parameter]()

        def make(plan: ChunkPlan) -> Chunk:
            key = plan.partial_axes, plan.rule.trains
            if key not in known:
                found = divisions(groups.mesh, plan.partial_axes, sharding_of(plan.rule, options))
                known[key] = [groups.dividing(each) for each in (found if plan.rule.trains else found[:-1])]
            if not plan.rule.trains:
                return Chunk(plan, replace(common, groups=known[key]))
            *sharing, copies = known[key]
            split = [slot for slot in plan.slots if plan.tiling.split_axes(slot.layout, groups.mesh)]
            blocks = {slot.name: OverBlocks(groups, slot.layout) for slot in split}
            return TrainedChunk(plan, replace(common, groups=sharing, copies=copies, blocks=blocks), masks)

        made = dict[int, list[Chunk]]()
        for stage, plans in stages.items():
            for plan in plans:
                made.setdefault(stage, []).append(chunk := make(plan))
                parameters.update(chunk.make_parameters())  # which frees what is not kept, before the next has memory
        if file is not None:
            file.reserve()
        _replace_parameters(self._module, parameters)
        return made

    def _plans(self) -> dict[int, list[ChunkPlan]]:
        """The chunks of each stage, with what is left of those that are pruned."""
        return {stage: place_chunks(plans, self.options, self.recipe) for stage, plans in self._divided.items()}

    def _hold(self) -> None:
        """Let the modules gather what they use of the chunks."""
        assert self.options.cache != "auto", "chosen before"
        self._gathering.hold(self.chunks, self.options.prefetch, self.options.cache)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Packed bits of this rank's parts of the parameters that are pruned, by name."""
        return self._frozen_masks | {
            slot.name: packed_bits(chunk.elements.unpruned(slot.start, slot.end))
            for chunk in self.trained
            for slot in chunk.plan.slots
            if chunk.elements.prunes and self.recipe.unpruned[slot.name] is not None
        }

    def _pruned_by(self, masks: Mapping[str, Tensor], recipe: Recipe) -> tuple[Recipe, dict[str, Tensor]]:
        """The recipe with what these masks leave, and the masks of frozen parameters, which have no buffers but themselves:
        theirs are kept for checkpoints alone."""
        shares = unpruned_shares(masks, self._layouts, self.groups.mesh, self.groups.rank)
        frozen = {name: bits for name, bits in masks.items() if not self.rules[name].trains}
        return recipe._replace(unpruned=dict.fromkeys(recipe.unpruned) | shares), frozen

    def prune(self, masks: Mapping[str, Tensor], *, empty: bool = False) -> None:
        """Go on with the parameters that `masks` prune: by name, packed bits of this rank's part of those that the recipe
        has a place for. Between steps; all ranks must call. The state of unpruned elements stays, and other parameters stay
        pruned, but for a state that is `empty`, whose parameters will be given values."""
        masks = ({} if empty else self.masks) | {name: masks[name] for name in self.recipe.unpruned if name in masks}
        self.recipe, self._frozen_masks = self._pruned_by(masks, self.recipe)
        for stage, plans in self._plans().items():
            for chunk, plan in zip(self._of_stage[stage], plans, strict=True):
                if isinstance(chunk, TrainedChunk) and (plan.mask is not None or chunk.elements.prunes):
                    chunk.prune(plan, masks, empty=empty)
        self._hold()

    @property
    def team(self) -> Group:
        """The ranks with the same stages. All ranks must ask for it when the first does."""
        return self.groups.along("dp", "cp", "tp")

    @property
    def gathers_on_use(self) -> bool:
        """Whether a forward pass, even one for evaluation, is something that all ranks must do together."""
        return any(chunk.plan.depths.parameters for chunk in self.chunks)

    def initialize(self, seed: int, std: float, *, only: Role | None = None) -> None:
        """Initial weights by name and position, as the modules declare them: of all parameters, or those of one role."""
        declared = dict(declarations(self._module))
        initial = {name: each.initial for name, each in declared.items() if only in (None, each.role)}
        for chunk in self.chunks:
            chunk.initialize(initial, seed, std)
        for buffer in self.buffers.values() if only is None else ():
            buffer.zero_()

    def begin(self) -> None:
        """Make what the update rules keep as it is before the first update."""
        for chunk in self.trained:
            chunk.begin()
            chunk.publish()

    def begin_step(self) -> None:
        """Clear the gradients; must precede the first microbatch of a step. Raises `UserError` as the class does."""
        _check_trainable(
            (slot.name, each.requires_grad is chunk.plan.rule.trains)
            for chunk in self.chunks
            for slot, each in zip(chunk.plan.slots, chunk.parameters)
        )
        self._gathering.begin_step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Set all gradients to zero, whatever has become of them."""
        self._reducing.clear()
        self._leaving.clear()
        for chunk in self.trained:
            chunk.gradients.clear()
            chunk.skip()  # of a step that was not finished

    @contextmanager
    def backward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Inside is the backward pass of a microbatch through a stage, or a part of it."""
        with self.groups.step.in_backward(stage, microbatch):
            yield
            for chunk in _trained(self._of_stage.get(stage, [])):
                chunk.gradients.end_backward()

    def reduce_on_arrival(self, stage: int) -> None:
        """The coming backward pass is the last of a stage: each chunk is reduced when its last gradient is there."""
        for chunk in _trained(self._of_stage.get(stage, [])):
            chunk.gradients.reduce_on_arrival()

    def start_reduction(self, stage: int) -> None:
        """A stage has done its last backward pass: begin to reduce what is not on its way yet."""
        for chunk in _trained(self._of_stage.get(stage, [])):
            chunk.gradients.start()

    def reduce_gradients(self) -> float:
        """Sum the gradients over the replicas; returns the Euclidean norm of all of them, each parameter counted once.

        It is not finite when any gradient is not. While one chunk is measured, others are still on their way.
        """
        self._gathering.end_passes()
        device = self.chunks[0].parameter.device
        square = torch.zeros((), device=device, dtype=square_dtype(device))
        for chunk in self.trained:
            gradients = chunk.gradients
            gradients.reduce()
            if "embedding" in chunk.plan.slots[0].layout.replicated_axes:
                self.groups.along("embedding").unwatched.all_reduce(gradients.reduced)
            if gradients.may_leave:
                self._let_leave(gradients)
            square += gradients.square_sum(self.tile) / (chunk.plan.replica_count if self._parted else 1)
        while self._leaving:
            self._leaving.popleft().leave()
        if self._parted:
            self.groups.world.unwatched.all_reduce(square)
        return float(square.sqrt().float())

    def step(self, lr: float, gradient_scale: float) -> None:
        """One optimizer step on every chunk; while one is updated, the parameters of those before it are gathered.

        State that is not on the device is updated in the order in which the next step uses it, and waited for by its uses.
        """
        self.steps += 1
        counted = [rule.count(self.counters, self.steps, lr) for rule in self._unlike]
        self.counters = {name: value for each in counted for name, value in each.items()}
        now = OptimizerStep(self.steps, lr, gradient_scale, self.counters)
        chunks = self._gathering.used_order(self.trained)  # as the next step will
        chunks.sort(key=lambda chunk: chunk.update.is_collective, reverse=True)  # at once, before the worker has any
        for chunk in chunks:
            chunk.whole.settle()
        for chunk, following in zip_longest(chunks, chunks[1:]):
            chunk.update.step(now, self.tile, None if following is None else following.disk)

    def skip(self) -> None:
        """The step is not applied."""
        for chunk in self.trained:
            chunk.skip()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the parameters are the model's: what is evaluated, saved and exported. All ranks must call.

        What has been on its way is here, so that one rank can go on alone with parameters that are kept whole.
        """
        self.skip()  # a step that was not finished
        for chunk in self.chunks:
            chunk.show()
        self.finish()
        try:
            with self._gathering.evaluating():
                yield
        finally:
            for chunk in self.chunks:
                if chunk.plan.rule.averages:
                    chunk.publish()

    def finish(self) -> None:
        """Have everything here that is under way, or kept whole; must precede the end of the process group."""
        for chunk in self.chunks:
            if chunk.plan.keeps_whole:
                chunk.whole.gather()
            chunk.whole.settle()

    def _limit_reductions(self, begun: GradientReduction) -> None:
        """A reduction has begun: let no more than a few hold their long buffers at once, or none be under way."""
        if not self.options.overlap:
            begun.finish()
        elif begun.chunk.plan.adds_gradients or (begun.leaves and not begun.alone):
            self._reducing.pop(begun, None)  # an earlier microbatch's, which has been waited for
            self._reducing[begun] = None
            if len(self._reducing) <= _REDUCING:
                return
            begun = next(iter(self._reducing))
            del self._reducing[begun]
            begun.free_gradient()
        if begun.may_leave and "embedding" not in begun.chunk.plan.slots[0].layout.replicated_axes:
            self._let_leave(begun)

    def _let_leave(self, gradients: GradientReduction) -> None:
        """Bring the gradients of a chunk to the host, which leave the device when a few others are on their way. They do so
        once: their reduction is finished here, if nothing has waited for it yet."""
        self._reducing.pop(gradients, None)
        gradients.start_leaving(self.tile)
        self._leaving.append(gradients)
        if len(self._leaving) > _REDUCING:
            self._leaving.popleft().leave()


def _trained(chunks: Iterable[Chunk]) -> list[TrainedChunk]:
    return [chunk for chunk in chunks if isinstance(chunk, TrainedChunk)]


def _check_trainable(parameters: Iterable[tuple[str, bool]]) -> None:
    """Of each: its name, and whether `requires_grad` is as planned. The optimizer goes over whole chunks: it would decay
    and move a parameter that has been frozen by hand."""
    others = [name for name, as_planned in parameters if not as_planned]
    if others:
        raise UserError(
            f"requires_grad is not as train.freeze says for {', '.join(others[:3])}"
            f"{f' and {len(others) - 3} more' if others[3:] else ''}: name there what is to be frozen, and leave "
            "requires_grad as it is"
        )


def _place_buffers(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Make the buffers anew, on `device`."""
    for owner in module.modules():
        for leaf, old in owner._buffers.items():
            if old is not None:
                setattr(owner, leaf, torch.zeros_like(old, device=device))
    return dict(module.named_buffers())


def _replace_parameters(module: nn.Module, made: Mapping[str, nn.Parameter]) -> None:
    """Put the new parameters in the places of the old, in every module that shares one."""
    new = {id(old): made[name] for name, old in module.named_parameters()}
    for owner in module.modules():
        for leaf, old in owner._parameters.items():
            if old is not None:
                setattr(owner, leaf, new[id(old)])
