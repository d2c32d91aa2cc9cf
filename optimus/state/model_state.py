"""Manages the chunks of a rank's pipeline stages."""

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
from optimus.model.linear import Factored
from optimus.model.parameters import Role, declarations, stored_buffers
from optimus.optim.rule import OptimizerStep
from optimus.state.buffers import RESIDENCES
from optimus.state.chunk import Chunk, TrainedChunk
from optimus.state.disk import StateFile
from optimus.state.gathering import ParameterPrefetcher
from optimus.state.masks import packed_bits
from optimus.state.matrices import OverBlocks
from optimus.state.placement import ChunkContext
from optimus.state.plan import ChunkPlan, StateSpec, place_chunks, shard_partitions, sharding_of, unpruned_shares
from optimus.state.reduction import GradientReduction
from optimus.state.transfers import Transfers, transfers

# Maximum number of chunks whose temporary whole gradient buffers are in reduction at once, and of chunks whose
# gradients are in transfer to the host at once.
_REDUCING = 2


@dataclass
class PruningProgress:
    """The progress of pruning, which checkpoints store."""

    events: int = 0
    """The number of prunings of the model."""
    unpruned: float = 1.0
    """The unpruned fraction of the prunable parameters."""
    distances: list[float] = field(default_factory=list)
    """Distances between consecutive masks among the last drawn masks, for the search for an early-bird ticket."""


class ModelState:
    """Replaces the parameters of `module` (usually on the meta device) and stores their state in chunks.

    `layouts` gives, by name, the layout of each parameter on the mesh of `groups`. `masks` are packed bits for this rank's
    slices of the pruned parameters. The new parameters of `module` are views of the chunks that hold this rank's slices. The
    values of the parameters are zero until `initialize` or `load_slices` fills them.

    `divided` are the planned chunks of each pipeline stage, from `state.plan.divide_stages`. `gathering` is the
    prefetcher whose `unit` and `gradient_buffers` the modules use. Without `gathering`, parameters must always be whole
    on the device, and autograd accumulates all gradients.

    Raises `UserError` where the caller has changed `requires_grad` of a parameter, and where a state file on a disk
    cannot be created.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        groups: Groups,
        options: StateConfig,
        divided: Mapping[int, Sequence[ChunkPlan]],
        *,
        spec: StateSpec,
        masks: Mapping[str, Tensor] | None = None,
        device: torch.device,
        gathering: ParameterPrefetcher | None = None,
        moves: Transfers | None = None,
    ) -> None:
        _check_trainable((name, each.requires_grad) for name, each in module.named_parameters())
        self.groups, self.options, self.rules = groups, options, spec.rules
        self._module, self.tile, self._layouts = module, options.tile, layouts
        self.spec, self._frozen_masks = self._pruned_by(masks or {}, spec)
        self.steps = 0  # optimizer steps applied
        self.drawn: Mapping[str, Tensor] | None = None  # candidate masks for the next pruning
        self.pruned = PruningProgress()
        self._unlike = set(spec.rules.values())  # the distinct rules of all stages
        self.counters = {name: 0.0 for rule in self._unlike for name in rule.counters}
        self._reducing = dict[GradientReduction, None]()  # reductions, in the order of their last starts
        self._offloading: deque[GradientReduction] = deque()
        self._divided = divided
        self._chunks_by_stage = self._make_chunks(masks or {}, moves or transfers(device))
        self.chunks = [chunk for chunks in self._chunks_by_stage.values() for chunk in chunks]
        self.trained = _trained(self.chunks)
        # Buffers of the modules, which no optimizer updates; replicated over `team`.
        self.buffers = _place_buffers(module, device)
        self._first_buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        # True if some rank lacks some gradients. Otherwise each rank computes the norm without communication.
        self._parted = any(chunk.plan.replica_count < groups.world.size for chunk in self.chunks)
        self._gathering = gathering or ParameterPrefetcher()
        self._hold()

    def _make_chunks(self, masks: Mapping[str, Tensor], moves: Transfers) -> dict[int, list[Chunk]]:
        """Makes the chunks of each stage, and replaces the parameters of the module by the parameters of the chunks."""
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
        # A cache, because partitioning thousands of ranks is slow.
        known: dict[tuple[tuple[str, ...], bool], list[Group]] = {}
        parameters = dict[str, nn.Parameter]()

        def make(plan: ChunkPlan) -> Chunk:
            key = plan.partial_axes, plan.rule.trains
            if key not in known:
                found = shard_partitions(groups.mesh, plan.partial_axes, sharding_of(plan.rule, options))
                known[key] = [groups.group_of(each) for each in (found if plan.rule.trains else found[:-1])]
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
                # `make_parameters` frees the whole parameters of a sharded chunk before the next chunk allocates.
                parameters.update(chunk.make_parameters())
        if file is not None:
            file.reserve()
        _replace_parameters(self._module, parameters)
        return made

    def _plans(self) -> dict[int, list[ChunkPlan]]:
        """Returns the chunks of each stage with the buffers that offloading and pruning need."""
        return {stage: place_chunks(plans, self.options, self.spec) for stage, plans in self._divided.items()}

    def _hold(self) -> None:
        """Registers the chunks with the prefetcher, which gathers the chunks that modules use."""
        assert self.options.cache != "auto", "`state.cache` must be decided before"
        self._forget_zeros()
        self._gathering.hold(self.chunks, self.options.prefetch, self.options.cache)

    def _forget_zeros(self) -> None:
        """Makes each linear layer with low-rank factors check again, in its next forward pass, whether its frozen
        weight has zeros."""
        for module in self._module.modules():
            if isinstance(module, Factored):
                module.pruned = None

    @property
    def masks(self) -> dict[str, Tensor]:
        """Packed bits for this rank's slices of the pruned parameters, by name."""
        return self._frozen_masks | {
            slot.name: packed_bits(chunk.elements.unpruned(slot.start, slot.end))
            for chunk in self.trained
            for slot in chunk.plan.slots
            if chunk.elements.prunes and self.spec.unpruned[slot.name] is not None
        }

    def _pruned_by(self, masks: Mapping[str, Tensor], spec: StateSpec) -> tuple[StateSpec, dict[str, Tensor]]:
        """Returns `spec` with the unpruned fractions of `masks`, and the masks of frozen parameters.

        The masks of frozen parameters compress no buffer.
        """
        shares = unpruned_shares(masks, self._layouts, self.groups.mesh, self.groups.rank)
        frozen = {name: bits for name, bits in masks.items() if not self.rules[name].trains}
        return spec._replace(unpruned=dict.fromkeys(spec.unpruned) | shares), frozen

    def prune(self, masks: Mapping[str, Tensor], *, empty: bool = False) -> None:
        """Prunes parameters by `masks`: by name, packed bits for this rank's slices of the prunable parameters.

        All ranks must call this method between steps. The state of unpruned elements stays, and a parameter without a
        new mask keeps its earlier mask. With `empty`, the method drops earlier masks and the state of pruned chunks,
        because the caller will load values.
        """
        masks = ({} if empty else self.masks) | {name: masks[name] for name in self.spec.unpruned if name in masks}
        self.spec, self._frozen_masks = self._pruned_by(masks, self.spec)
        for stage, plans in self._plans().items():
            for chunk, plan in zip(self._chunks_by_stage[stage], plans, strict=True):
                if isinstance(chunk, TrainedChunk) and (plan.mask is not None or chunk.elements.prunes):
                    chunk.prune(plan, masks, empty=empty)
        self._hold()

    @property
    def team(self) -> Group:
        """The group of ranks with the same pipeline stages."""
        return self.groups.along("dp", "cp", "tp")

    @property
    def gathers_on_use(self) -> bool:
        """True if parameters are sharded. All ranks must then run each forward pass together, also for evaluation."""
        return any(chunk.plan.depths.parameters for chunk in self.chunks)

    def initialize(self, seed: int, std: float, *, only: Role | None = None) -> None:
        """Sets the initial weights that the modules declare for all parameters, or for parameters of the role `only`.

        The values do not depend on the mesh or the chunks: each element's random number follows from the seed, the
        parameter's name and the element's position.
        """
        declared = dict(declarations(self._module))
        initial = {name: each.initial for name, each in declared.items() if only in (None, each.role)}
        for chunk in self.chunks:
            chunk.initialize(initial, seed, std)
        for name, buffer in self.buffers.items() if only is None else ():
            buffer.copy_(self._first_buffers[name])

    def begin(self) -> None:
        """Initializes the state of the update rules for the first update; the caller has loaded the weights."""
        self._forget_zeros()
        for chunk in self.trained:
            chunk.begin()
            chunk.refresh_compute_copy()

    def begin_step(self) -> None:
        """Clears the gradients; must precede the first microbatch of a step. Raises `UserError` where the caller has changed
        `requires_grad` of a parameter."""
        _check_trainable(
            (slot.name, each.requires_grad is chunk.plan.rule.trains)
            for chunk in self.chunks
            for slot, each in zip(chunk.plan.slots, chunk.parameters)
        )
        self._gathering.begin_step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Sets all gradients to zero, after the wait for running reductions."""
        self._reducing.clear()
        self._offloading.clear()
        for chunk in self.trained:
            chunk.gradients.clear()
            chunk.skip()  # the last step may be unfinished

    @contextmanager
    def backward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Encloses the backward pass of a microbatch through a stage, or a part of that pass."""
        with self.groups.step.in_backward(stage, microbatch):
            yield
            for chunk in _trained(self._chunks_by_stage.get(stage, [])):
                chunk.gradients.end_backward()

    def reduce_on_arrival(self, stage: int) -> None:
        """Announces the last backward pass of a stage: each chunk reduces its gradients when the chunk's last gradient
        has arrived."""
        for chunk in _trained(self._chunks_by_stage.get(stage, [])):
            chunk.gradients.reduce_on_arrival()

    def start_reduction(self, stage: int) -> None:
        """Starts the remaining reductions of a stage after the stage's last backward pass."""
        for chunk in _trained(self._chunks_by_stage.get(stage, [])):
            chunk.gradients.start()

    def reduce_gradients(self) -> float:
        """Sums the gradients over the replicas; returns the Euclidean norm of all gradients, each parameter counted once.

        The norm is not finite when any gradient is not finite. The reductions of other chunks may overlap with the
        computation of one chunk's norm.
        """
        self._gathering.end_passes()
        device = self.chunks[0].parameter.device
        square = torch.zeros((), device=device, dtype=square_dtype(device))
        for chunk in self.trained:
            gradients = chunk.gradients
            gradients.reduce()
            if "embedding" in chunk.plan.slots[0].layout.replicated_axes:
                self.groups.along("embedding").unwatched.all_reduce(gradients.reduced)
            if gradients.may_offload:
                self._begin_offload(gradients)
            square += gradients.square_sum(self.tile) / (chunk.plan.replica_count if self._parted else 1)
        while self._offloading:
            self._offloading.popleft().finish_offload()
        if self._parted:
            self.groups.world.unwatched.all_reduce(square)
        return float(square.sqrt().float())

    def step(self, lr: float, gradient_scale: float) -> None:
        """Runs one optimizer step on every trained chunk; the update of a chunk may overlap with the all-gathers of
        earlier chunks.

        Collective updates come first. Then the method updates the chunks in the order of their first use in this step.
        Each use of an offloaded chunk waits for the chunk's update.
        """
        self.steps += 1
        counted = [rule.count(self.counters, self.steps, lr) for rule in self._unlike]
        self.counters = {name: value for each in counted for name, value in each.items()}
        now = OptimizerStep(self.steps, lr, gradient_scale, self.counters)
        chunks = self._gathering.used_order(self.trained)  # the next step probably uses the chunks in the same order
        # Collective updates run first, in this thread, before the update thread gets any update.
        chunks.sort(key=lambda chunk: chunk.update.is_collective, reverse=True)
        for chunk in chunks:
            chunk.unsharded.wait()
        for chunk, following in zip_longest(chunks, chunks[1:]):
            chunk.update.step(now, self.tile, None if following is None else following.disk)

    def skip(self) -> None:
        """Discards the step: the weights stay unchanged."""
        for chunk in self.trained:
            chunk.skip()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switches to the evaluation weights (averaged, if the rule averages) inside the context. All ranks must
        call this method.

        The method finishes running transfers. Therefore one rank can continue alone if all parameters are always whole
        on the device.
        """
        self.skip()  # the last step may be unfinished
        for chunk in self.chunks:
            chunk.use_eval_weights()
        self.finish()
        try:
            with self._gathering.evaluating():
                yield
        finally:
            for chunk in self.chunks:
                if chunk.plan.rule.averages:
                    chunk.refresh_compute_copy()

    def finish(self) -> None:
        """Waits for running updates and parameter transfers, and all-gathers the parameters that are always whole on
        the device; must precede the end of the process group."""
        for chunk in self.chunks:
            if chunk.plan.keeps_unsharded:
                chunk.unsharded.gather()
            chunk.unsharded.wait()

    def _limit_reductions(self, begun: GradientReduction) -> None:
        """Limits the running reductions after `begun` has started.

        Without `overlap`, `begun` finishes at once. Otherwise, at most `_REDUCING` reductions keep temporary whole
        gradient buffers.
        """
        if not self.options.overlap:
            begun.finish()
        elif begun.chunk.plan.adds_gradients or (begun.offloaded and not begun.alone):
            self._reducing.pop(begun, None)  # the finished reduction of an earlier microbatch
            self._reducing[begun] = None
            if len(self._reducing) <= _REDUCING:
                return
            begun = next(iter(self._reducing))
            del self._reducing[begun]
            begun.free_gradient()
        if begun.may_offload and "embedding" not in begun.chunk.plan.slots[0].layout.replicated_axes:
            self._begin_offload(begun)

    def _begin_offload(self, gradients: GradientReduction) -> None:
        """Starts the copy of a chunk's gradients to the host. If more than `_REDUCING` copies are running, waits for
        the oldest copy and frees the device memory of the copied gradients.

        The method first finishes the reduction, because the copy needs the sums.
        """
        self._reducing.pop(gradients, None)
        gradients.offload_gradient(self.tile)
        self._offloading.append(gradients)
        if len(self._offloading) > _REDUCING:
            self._offloading.popleft().finish_offload()


def _trained(chunks: Iterable[Chunk]) -> list[TrainedChunk]:
    return [chunk for chunk in chunks if isinstance(chunk, TrainedChunk)]


def _check_trainable(parameters: Iterable[tuple[str, bool]]) -> None:
    """Checks pairs of a parameter's name and a flag, which is true if `requires_grad` is as planned.

    The optimizer processes whole chunks, so an update would change a parameter whose `requires_grad` the caller has set
    to False. Raises `UserError` with the names of parameters whose flag is false.
    """
    others = [name for name, as_planned in parameters if not as_planned]
    if others:
        raise UserError(
            f"requires_grad contradicts train.freeze for {', '.join(others[:3])}"
            f"{f' and {len(others) - 3} more' if others[3:] else ''}: name the parameters to freeze in train.freeze, and "
            "leave requires_grad unchanged"
        )


def _place_buffers(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Replaces the buffers of the module by copies on `device`, or by zeros if they have no values. Returns the new buffers
    that checkpoints store, by name."""
    for owner in module.modules():
        for leaf, old in owner._buffers.items():
            if old is not None:
                owner._buffers[leaf] = (
                    torch.zeros_like(old, device=device) if old.is_meta else old.to(device, copy=True)
                )
    return dict(stored_buffers(module))


def _replace_parameters(module: nn.Module, made: Mapping[str, nn.Parameter]) -> None:
    """Replaces each old parameter by the new parameter of the same name, in every module that shares the old
    parameter."""
    new = {id(old): made[name] for name, old in module.named_parameters()}
    for owner in module.modules():
        for leaf, old in owner._parameters.items():
            if old is not None:
                setattr(owner, leaf, new[id(old)])
