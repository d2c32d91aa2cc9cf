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
from optimus.state.placement import ChunkContext, Placement
from optimus.state.plan import ChunkPlan, StateSpec, place_chunks, shard_partitions, sharding_of, unpruned_shares
from optimus.state.reduction import GradientReduction
from optimus.state.transfers import Transfers, transfers
from optimus.step_context import CLEARING, NORM, REDUCTION, in_region

# Limits the running reductions with temporary gradient buffers, and separately the running gradient transfers to the
# host.
_REDUCING = 2


@dataclass
class PruningProgress:
    """The pruning progress that checkpoints store."""

    events: int = 0
    """The number of prunings of the model."""
    unpruned: float = 1.0
    """The unpruned fraction of the prunable parameters."""
    distances: list[float] = field(default_factory=list)
    """The latest distances between consecutive drawn masks, for the search for an early-bird ticket."""


class ModelState:
    """Replaces the parameters and buffers of `module`, and stores the state of the parameters in chunks.

    `layouts` gives, by name, the layout of each parameter on the mesh of `groups`. `masks` are packed bits for this
    rank's slices of the pruned parameters. `divided` has the planned chunks of each pipeline stage. Without the
    prefetcher `gathering`, parameters must stay unsharded on the device.

    The caller must initialize or load the new parameters. Raises `UserError` if `requires_grad` of a parameter is
    False.
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
        # The group of all ranks for decisions before the reductions end.
        self.deciding = groups.beside("pp", "dp", "cp", "tp")
        self.steps = 0
        self.drawn: Mapping[str, Tensor] | None = None  # candidate masks for the next pruning
        self.pruned = PruningProgress()
        self._unlike = set(spec.rules.values())
        self.counters = {name: 0.0 for rule in self._unlike for name in rule.counters}
        self._reducing = dict[GradientReduction, None]()  # reductions, in the order of their last starts
        self._offloading: deque[GradientReduction] = deque()
        self._divided = divided
        self._chunks_by_stage = self._make_chunks(masks or {}, moves or transfers(device, pinned=options.pin_memory))
        self.chunks = [chunk for chunks in self._chunks_by_stage.values() for chunk in chunks]
        self.trained = _trained(self.chunks)
        self.buffers = _place_buffers(module, device)
        self._first_buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        # True if not all ranks store the same shards.
        self._parted = any(chunk.plan.replica_count < groups.world.size for chunk in self.chunks)
        self._gathering = gathering or ParameterPrefetcher()
        self._hold()

    def _make_chunks(self, masks: Mapping[str, Tensor], moves: Transfers) -> dict[int, list[Chunk]]:
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
        known: dict[tuple[tuple[str, ...], bool, bool], list[Group]] = {}
        parameters = dict[str, nn.Parameter]()

        def make(plan: ChunkPlan) -> Chunk:
            key = plan.partial_axes, plan.rule.trains, plan.small
            if key not in known:
                sharding = sharding_of(plan.rule, options, small=plan.small)
                found = shard_partitions(groups.mesh, plan.partial_axes, sharding)
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
                # `make_parameters` frees the unsharded parameters of a sharded chunk before the next chunk allocates.
                parameters.update(chunk.make_parameters())
        if file is not None:
            file.reserve()
        _replace_parameters(self._module, parameters)
        return made

    def _plans(self) -> dict[int, list[ChunkPlan]]:
        return {stage: place_chunks(plans, self.options, self.spec) for stage, plans in self._divided.items()}

    def _hold(self) -> None:
        cache = self.options.cache
        assert cache is None or isinstance(cache, int), "`state.cache` must be decided before"
        self._forget_zeros()
        self._gathering.hold(self.chunks, self.options.prefetch, cache)

    def _forget_zeros(self) -> None:
        """Makes linear layers with low-rank factors check again whether their frozen weights have zeros."""
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
        """Returns (`spec` with the unpruned fractions of `masks`, masks of frozen parameters)."""
        shares = unpruned_shares(masks, self._layouts, self.groups.mesh, self.groups.rank)
        frozen = {name: bits for name, bits in masks.items() if not self.rules[name].trains}
        return spec._replace(unpruned=dict.fromkeys(spec.unpruned) | shares), frozen

    def prune(self, masks: Mapping[str, Tensor], *, empty: bool = False) -> None:
        """Prunes parameters by `masks`, which map names to packed bits for this rank's slices.

        All ranks must call this method between steps. Unless `empty`, a parameter without a new mask keeps its earlier
        mask. With `empty`, the method drops earlier masks, and the weights and optimizer state of pruned chunks.
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
        """True if some parameters are sharded. All ranks must then run the same forward passes."""
        return any(chunk.plan.depths.parameters for chunk in self.chunks)

    def initialize(self, seed: int, std: float, *, only: Role | None = None) -> None:
        """Sets the initial weights that the modules declare for all parameters, or for parameters of the role `only`.

        The values do not depend on the mesh. Without `only`, the method also resets the buffers that checkpoints store.
        """
        declared = dict(declarations(self._module))
        initial = {name: each.initial for name, each in declared.items() if only in (None, each.role)}
        for chunk in self.chunks:
            chunk.initialize(initial, seed, std)
        for name, buffer in self.buffers.items() if only is None else ():
            buffer.copy_(self._first_buffers[name])

    def begin(self) -> None:
        """Initializes the state of the update rules from the current weights, and recomputes the compute weights."""
        self._forget_zeros()
        for chunk in self.trained:
            chunk.begin()
            chunk.refresh_compute_copy()

    def begin_step(self, bounded: bool = False) -> None:
        """Clears the gradients; must precede the first microbatch of a step. `bounded` announces `square_bound`. Raises
        `UserError` if the caller has changed `requires_grad` of a parameter."""
        _check_trainable(
            (slot.name, each.requires_grad is chunk.plan.rule.trains)
            for chunk in self.chunks
            for slot, each in zip(chunk.plan.slots, chunk.parameters)
        )
        self._gathering.begin_step()
        self.clear_gradients()
        for chunk in self.trained:
            chunk.gradients.bounded = bounded

    @in_region(CLEARING)
    def clear_gradients(self) -> None:
        """Waits for running reductions, and clears the gradients."""
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
        """Announces that no further gradients of a stage come in this step; may start reductions."""
        for chunk in _trained(self._chunks_by_stage.get(stage, [])):
            chunk.gradients.start()

    def reduce_gradients(self) -> float:
        """Completes the gradient reductions; returns the Euclidean norm of the gradients, each parameter counted once.

        The norm is not finite when any gradient is not finite.
        """
        self._gathering.end_passes()
        squares = {chunk: self._reduce(chunk) for chunk in self.trained}
        while self._offloading:
            self._offloading.popleft().finish_offload()
        return self._norm(squares)

    @in_region(REDUCTION)
    def _reduce(self, chunk: TrainedChunk) -> Tensor:
        """Completes a chunk's reduction; returns the sum of squares of this rank's reduced gradients."""
        gradients = chunk.gradients
        gradients.reduce()
        if _in_embedding_group(chunk):
            self.groups.along("embedding").unwatched.all_reduce(gradients.reduced)
        if gradients.may_offload:
            self._begin_offload(gradients)
        return gradients.square_sum(self.tile)

    @in_region(NORM)
    def _norm(self, squares: Mapping[TrainedChunk, Tensor]) -> float:
        device = self.chunks[0].parameter.device
        square = torch.zeros((), device=device, dtype=square_dtype(device))
        for chunk in self.trained:
            square += squares[chunk] / (chunk.plan.replica_count if self._parted else 1)
        if self._parted:
            self.groups.world.unwatched.all_reduce(square)
        return float(square.sqrt().float())

    @property
    def updates_on_arrival(self) -> bool:
        """True if `reduce_and_step` can overlap updates with reductions.

        Other ranks must have gradients of the same parameters, and the group `deciding` must not wait for reductions. The
        state must be on the device: updates of offloaded state overlap the next forward pass instead.
        """
        options, replicas = self.options, self.groups.along("dp", "cp")
        decides = self.groups.tags or self.deciding is not replicas
        return options.overlap and options.offload == "none" and replicas.size > 1 and decides

    def square_bound(self) -> Tensor:
        """Starts the reduction of all gradients of a `bounded` step. Returns an fp32 tensor [1], whose sum over all
        ranks is at least the square of `reduce_gradients`, up to rounding; not finite if a gradient is not finite.

        The bound is known before the reductions end: each rank measures its gradients before it sends them.
        """
        bound_1 = torch.zeros(1, device=self.chunks[0].parameter.device)
        for chunk in self.trained:
            bound_1 += chunk.gradients.square_bound()
        return bound_1 * self.groups.world.size

    def reduce_and_step(self, lr: float, gradient_scale: float) -> float:
        """Completes the gradient reductions, and updates each chunk as soon as its gradients are reduced (AxoNN, section
        3.3.3). Needs `updates_on_arrival`.

        Returns the norm that `reduce_gradients` would return; the state is the same as after `reduce_gradients` and
        `step`. `square_bound` must show that the gradients are fit for an update.
        """
        self._gathering.end_passes()
        now = self._begin_update(lr, gradient_scale)
        # The backward pass starts the reductions in this order. Collective updates are in one order on all ranks.
        chunks = self.trained[::-1]
        for chunk in chunks:
            chunk.unsharded.wait()
        squares = dict[TrainedChunk, Tensor]()
        for chunk in chunks:
            chunk.gradients.begin_last()
            on_arrival = chunk.gradients.arriving and not _in_embedding_group(chunk)
            if not on_arrival:
                squares[chunk] = self._reduce(chunk)
            chunk.update.step(now, self.tile, on_arrival=on_arrival)
            if on_arrival:
                squares[chunk] = chunk.gradients.square_sum(self.tile)
        return self._norm(squares)

    def _begin_update(self, lr: float, gradient_scale: float) -> OptimizerStep:
        self.steps += 1
        counted = [rule.count(self.counters, self.steps, lr) for rule in self._unlike]
        self.counters = {name: value for each in counted for name, value in each.items()}
        return OptimizerStep(self.steps, lr, gradient_scale, self.counters)

    def step(self, lr: float, gradient_scale: float) -> None:
        """Begins one optimizer step on every trained chunk; updates of offloaded chunks may end later."""
        now = self._begin_update(lr, gradient_scale)
        chunks = self._gathering.used_order(self.trained)
        # Collective updates run in this thread, before the update thread gets any update.
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
        """Switches to the evaluation weights (averaged, if the rule averages) inside the context. All ranks must call
        this method."""
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
        """Waits for running updates and parameter transfers, and all-gathers parameters that stay unsharded.

        Must precede the end of the process group.
        """
        for chunk in self.chunks:
            if chunk.plan.keeps_unsharded:
                chunk.unsharded.gather()
            chunk.unsharded.wait()

    def _limit_reductions(self, begun: GradientReduction) -> None:
        """Limits the running reductions after `begun` has started; may begin to copy gradients to the host."""
        if not self.options.overlap:
            begun.finish()
        elif begun.chunk.plan.adds_gradients or (begun.offloaded and not begun.alone):
            self._reducing.pop(begun, None)
            self._reducing[begun] = None
            if len(self._reducing) <= _REDUCING:
                return
            begun = next(iter(self._reducing))
            del self._reducing[begun]
            begun.free_gradient()
        if begun.may_offload and not _in_embedding_group(begun.chunk):
            self._begin_offload(begun)

    def _begin_offload(self, gradients: GradientReduction) -> None:
        """Begins to copy a chunk's reduced gradients to the host; waits for the oldest copy if too many copies run."""
        self._reducing.pop(gradients, None)
        gradients.offload_gradient(self.tile)
        self._offloading.append(gradients)
        if len(self._offloading) > _REDUCING:
            self._offloading.popleft().finish_offload()


def _trained(chunks: Iterable[Chunk]) -> list[TrainedChunk]:
    return [chunk for chunk in chunks if isinstance(chunk, TrainedChunk)]


def _in_embedding_group(chunk: Placement) -> bool:
    """Returns True if the chunk's gradients are also summed over the embedding group, at the end of a step."""
    return "embedding" in chunk.plan.slots[0].layout.replicated_axes


def _check_trainable(parameters: Iterable[tuple[str, bool]]) -> None:
    """Raises `UserError` if any flag in `parameters` is False.

    `parameters` yields (name of a parameter, True if the parameter's `requires_grad` is as planned).
    """
    others = [name for name, as_planned in parameters if not as_planned]
    if others:
        raise UserError(
            f"requires_grad contradicts train.freeze for {', '.join(others[:3])}"
            f"{f' and {len(others) - 3} more' if others[3:] else ''}: name the parameters to freeze in train.freeze, and "
            "leave requires_grad unchanged"
        )


def _place_buffers(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Replaces the buffers of the module by copies on `device`; buffers on the meta device become zeros. Returns the
    new buffers that checkpoints store, by name."""
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
