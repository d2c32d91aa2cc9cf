"""A chunk: parameters laid end to end in flat buffers, with their fp32 master weights and what an update rule keeps.

The module's parameters are views of the chunk's compute buffer, so that gathering, updating and saving are operations on a
few long tensors, whatever the model. All parameters of a chunk have the same replicas and the same rule. The replicas shard
the chunk in steps (`plan.py`): each rank keeps some part of each buffer (`buffers.py`).

Read `placement.py` (where its buffers are), `whole.py` (whole parameters, where they are used), `reduction.py` (gradients)
and `update.py`; what may happen, and in which order, is in `statuses.py`. A chunk of frozen parameters has the first two.
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
from optimus.state.update import Update
from optimus.state.whole import WholeParameters


class Chunk(Placement):
    """The parameters of `plan`; see the module's text.

    Whoever reads what a checkpoint holds, or changes it, does so inside `states`, which waits for the update that is under
    way and gives each thread buffers of its own for what is on a disk.
    """

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(plan, context, masks)
        self.whole = WholeParameters(self)
        self.parameters: list[nn.Parameter] = []  # of the module
        self.gradient_buffers: Mapping[nn.Parameter, GradientBuffer] = {}  # of those that are trained

    @contextmanager
    def states(self, change: bool = False, *, after: Handle | None = None) -> Iterator[Mapping[str, Tensor]]:
        """Inside, what a checkpoint holds of this chunk is in memory, by the prefix of its keys: this rank's part, behind
        the update that is under way. With `change` it may be written to, behind whoever copies it; `publish` must follow.

        Only the thread that trains knows what is under way: another waits for the `updated` that it was given, `after`.
        """
        if after is not None:
            after.wait()
        elif change:
            self.whole.settle()
            self.part.copy.finish()
            self.part.go("write")
        else:
            self.part.finish_update()
            self.part.go("read")
        self.transfers.synchronize()
        loaded = NOTHING_ON_DISK if self.disk is None else self.disk.loaded(change)
        with loaded as on_disk:
            yield self.by_prefix(on_disk)

    @property
    def updated(self) -> Handle:
        """Waits for the update that is under way now; any thread may call it."""
        updating = self.part.until

        def wait() -> None:
            if updating is not None:
                updating.wait()
            self.transfers.synchronize()

        return Handle(wait)

    def hold(self, until: Handle, weights: bool = False) -> None:
        """Wait for `until`, once, before the next update changes this rank's part: it is done when that has been copied or
        written. `weights`: what is computed with is copied, too."""
        self.part.copy = Status("copy")  # others have been waited for by whoever makes this one
        self.part.copy.go("hold weights" if weights else "hold", until)

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) for every slot; the parameters are views of the buffer."""
        for name, view in self.views(self.parameter).items():
            self.parameters.append(nn.Parameter(view, requires_grad=self.plan.rule.trains))
            yield name, self.parameters[-1]
        self.whole.reshard()

    def initialize(self, initial: Mapping[str, Initial], seed: int, std: float) -> None:
        """Initial weights, of the kind that `initial` names, by name and position: each rank makes its own part. Other
        parameters stay as they are."""
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
        self.publish()

    def begin(self) -> None:
        """Make what the update rule keeps as it is before the first update."""
        with self.states(change=True) as states:
            weights, *kept = states.values()
            self.plan.rule.begin(weights, kept)

    def publish(self) -> None:
        """Make the compute copies anew after the master weights have changed; begin to gather those that are kept."""
        self.whole.settle()
        self.part.go("compute")
        if self.plan.has_master:
            with self.states() as states:
                weights, *kept = states.values()
                self.plan.rule.computed(weights, kept, self.compute_shard)
        self.whole.invalidate()

    def show(self) -> None:
        """Compute with the weights themselves, as an evaluation does, where training does not; `publish` goes back.

        No checkpoint that is being written has what such a rule computes with.
        """
        if self.plan.rule.averages:
            self.whole.settle()
            with self.states() as states:
                self.compute_shard.copy_(states["model"])
            self.whole.invalidate()

    def gathered_state(self, prefix: str) -> Tensor:
        """The whole chunk's state with this prefix of a checkpoint, fp32 on the device. All ranks of its groups call."""
        self.whole.settle()
        whole = torch.zeros(self.plan.size, dtype=torch.float32, device=self.parameter.device)
        with self.states() as states:
            whole[self.plan.shard] = states[prefix].to(whole.device)
        for depth in reversed(range(self.plan.depths.optimizer)):
            outer, inner = whole[self.plan.extent(depth)], whole[self.plan.extent(depth + 1)]
            self.groups[depth].all_gather(outer, inner, self.plan.lengths(depth))
        self.elements.expand(whole, self.plan.borders[-1], fresh=False)
        return whole


class TrainedChunk(Chunk):
    """A chunk that an update rule updates: gradients beside the weights, their reduction and the update."""

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(plan, context, masks)
        assert isinstance(plan.rule, UpdateRule)
        self.gradients = GradientReduction(self, self.whole)
        self.gradient_buffers = self.gradients.buffers
        self.update = Update(self, self.whole, self.gradients, plan.rule)

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) for every slot; the parameters and their gradients are views of the buffers."""
        views = self.views(self.gradients.gradient)
        for name, parameter in super().make_parameters():
            self.gradients.take(parameter, views[name])
            yield name, parameter
        self.gradients.free()  # now that the views of it are made

    def skip(self) -> None:
        """The step is not applied: what gradients wait in the place of is made anew, and they are no more."""
        if self.part.status == "lent":
            self.gradients.clear()
            self.publish()

    def prune(self, plan: ChunkPlan, masks: Mapping[str, Tensor], *, empty: bool = False) -> None:
        """Go on with `plan`, of the same parameters, of which some are pruned by `masks`. Between steps; all ranks of the
        groups must call. The state of the unpruned elements stays; none is there if `empty`."""
        self.gradients.clear()
        self.whole.settle()
        with self.states() as states:
            prefixes = [] if empty else [*states]
        unpruned = positions(plan, masks)[plan.shard].to(self.parameter.device)
        parts = {prefix: self.gathered_state(prefix)[unpruned] for prefix in prefixes}
        self.part.copy.finish()
        self.part.go("write")
        self.place(plan, masks)
        self.gradients.place()
        with self.states(change=True) as states:
            for prefix, part in parts.items():
                states[prefix][: len(part)] = part.to(states[prefix].device)
                states[prefix][len(part) :].zero_()
        if plan.keeps_whole:
            self.parameter.zero_()
        if not empty:
            self.publish()
        self.gradients.free()
