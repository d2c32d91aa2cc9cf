"""A chunk: parameters in flat buffers, with their optimizer state, if any.

The parameters of the `nn.Module` are views of the chunk's parameter buffer. All parameters of a chunk have the same
replicas and the same update rule.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from optimus.comm import Handle
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.model.init import initialize_parameter
from optimus.model.parameters import Initial
from optimus.optim.rule import UpdateRule
from optimus.state.placement import NOTHING_ON_DISK, ChunkContext, Placement, positions
from optimus.state.plan import ChunkPlan
from optimus.state.reduction import GradientReduction
from optimus.state.statuses import Status
from optimus.state.unsharded import UnshardedParameters
from optimus.state.update import Update


class Chunk(Placement):
    """The chunk of `plan`, without gradients."""

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(plan, context, masks)
        self.unsharded = UnshardedParameters(self)
        self.parameters: list[nn.Parameter] = []
        self.gradient_buffers: Mapping[nn.Parameter, GradientBuffer] = {}  # empty for frozen parameters

    @contextmanager
    def states(self, change: bool = False, *, after: Handle | None = None) -> Iterator[Mapping[str, Tensor]]:
        """Waits for the running update, and yields the checkpointed state of this rank's shard by key prefix.

        With `change`, the context also waits for pending copies of the state. The caller may then write to the state,
        and must call `refresh_compute_copy` afterwards.

        Any thread but the training thread must pass the training thread's `updated` handle as `after`.
        """
        if after is not None:
            after.wait()
        elif change:
            self.unsharded.wait()
            self.part.copy.finish()
            self.part.transition("write")
        else:
            self.part.finish_update()
            self.part.transition("read")
        self.transfers.synchronize()
        loaded = NOTHING_ON_DISK if self.disk is None else self.disk.loaded(change)
        with loaded as on_disk:
            yield self.by_prefix(on_disk)

    @property
    def updated(self) -> Handle:
        """A handle that waits for the running update, in any thread."""
        updating = self.part.until

        def wait() -> None:
            if updating is not None:
                updating.wait()
            self.transfers.synchronize()

        return Handle(wait)

    def block_update_until(self, until: Handle, weights: bool = False) -> None:
        """Blocks the next update of this rank's shard until the handle `until` is done.

        With `weights`, the operation of `until` also reads the compute weights.
        """
        self.part.copy = Status("copy")  # the caller has waited for earlier copies
        self.part.copy.transition("hold weights" if weights else "hold", until)

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields (name, parameter) for every slot."""
        for name, view in self.views(self.parameter).items():
            self.parameters.append(nn.Parameter(view, requires_grad=self.plan.rule.trains))
            yield name, self.parameters[-1]
        self.unsharded.reshard()

    def initialize(self, initial: Mapping[str, Initial], seed: int, std: float) -> None:
        """Sets this rank's shard of the parameters in `initial` (by name) to the initial weights.

        If the chunk has a parameter in `initial`, the update rule's state begins anew for the whole chunk.
        """
        named = [slot for slot in self.plan.slots if slot.name in initial]
        if not named:
            return
        part = self.dense_extent
        with self.states(change=True) as states:
            weights = self.dense_part(states["model"])
            for slot in named:
                start, end = max(slot.start, part.start), min(slot.end, part.stop)
                if start < end:
                    here = weights[start - part.start : end - part.start]
                    begin = start - slot.start
                    initialize_parameter(slot.name, here, initial[slot.name], seed, std, begin, slot.global_positions)
            self.fill_part(states["model"], weights)
        self.begin()
        self.refresh_compute_copy()

    def begin(self) -> None:
        """Initializes the update rule's state for the first update."""
        with self.states(change=True) as states:
            weights, *moments = states.values()
            self.plan.rule.begin(weights, moments)

    def refresh_compute_copy(self) -> None:
        """Recomputes the compute weights from separate master weights, if any, and invalidates the gathered
        parameters."""
        self.unsharded.wait()
        self.part.transition("compute")
        if self.plan.has_master:
            with self.states() as states:
                weights, *moments = states.values()
                self.plan.rule.computed(weights, moments, self.compute_shard)
        self.unsharded.invalidate()

    def use_eval_weights(self) -> None:
        """Switches to the averaged weights if the update rule averages weights; `refresh_compute_copy` switches
        back."""
        if self.plan.rule.averages:
            self.unsharded.wait()
            with self.states() as states:
                self.compute_shard.copy_(states["model"])
            self.unsharded.invalidate()

    def gathered_state(self, prefix: str) -> Tensor:
        """All-gathers the chunk's state under the checkpoint prefix `prefix`.

        Returns a dense tensor [plan.size] in fp32 on the device. All ranks of the chunk's groups must call this method.
        """
        self.unsharded.wait()
        gathered = torch.zeros(self.plan.size, dtype=torch.float32, device=self.parameter.device)
        with self.states() as states:
            gathered[self.plan.shard] = states[prefix].to(gathered.device)
        for depth in reversed(range(self.plan.depths.optimizer)):
            outer, inner = gathered[self.plan.extent(depth)], gathered[self.plan.extent(depth + 1)]
            self.groups[depth].all_gather(outer, inner, self.plan.lengths(depth))
        self.elements.expand(gathered, self.plan.borders[-1], fresh=False)
        return gathered


class TrainedChunk(Chunk):
    """A chunk with gradients, gradient reduction and update."""

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(plan, context, masks)
        assert isinstance(plan.rule, UpdateRule)
        self.gradients = GradientReduction(self, self.unsharded)
        self.gradient_buffers = self.gradients.buffers
        self.update = Update(self, self.unsharded, self.gradients, plan.rule)

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields (name, parameter) for every slot; the gradients are views of the gradient buffer."""
        views = self.views(self.gradients.gradient)
        for name, parameter in super().make_parameters():
            self.gradients.take(parameter, views[name])
            yield name, parameter
        self.gradients.free()  # only after the views of the gradient buffer exist

    def skip(self) -> None:
        """Recomputes the compute weights if gradients wait in their memory, and drops these gradients."""
        if self.part.status == "lent":
            self.gradients.clear()
            self.refresh_compute_copy()

    def prune(self, plan: ChunkPlan, masks: Mapping[str, Tensor], *, empty: bool = False) -> None:
        """Switches to `plan` and to the pruning of `masks`.

        `plan` must have the same parameters as the current plan. All ranks of the groups must call this method between
        steps. The state of unpruned elements stays, unless `empty`.
        """
        self.gradients.clear()
        self.unsharded.wait()
        with self.states() as states:
            prefixes = [] if empty else [*states]
        unpruned = positions(plan, masks)[plan.shard].to(self.parameter.device)
        parts = {prefix: self.gathered_state(prefix)[unpruned] for prefix in prefixes}
        self.part.copy.finish()
        self.part.transition("write")
        self.allocate(plan, masks)
        self.gradients.switch_buffers()
        with self.states(change=True) as states:
            for prefix, part in parts.items():
                states[prefix][: len(part)] = part.to(states[prefix].device)
                states[prefix][len(part) :].zero_()
        if plan.keeps_unsharded:
            self.parameter.zero_()
        if not empty:
            self.refresh_compute_copy()
        self.gradients.free()
