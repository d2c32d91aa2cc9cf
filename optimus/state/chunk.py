"""A chunk: parameters laid end to end in flat buffers, with their fp32 master weights and what an update rule keeps.

The module's parameters are views of the chunk's compute buffer, so that gathering, updating and saving are operations on a
few long tensors, whatever the model. All parameters of a chunk have the same replicas and the same rule. The replicas shard
the chunk in steps (`plan.py`): each rank keeps some part of each buffer (`buffers.py`).

Parameters that are not kept whole have memory while they are used: from when a module needs them (`gathering.py`). They are
gathered in the steps in which they are sharded, backwards; first those parts that other ranks have updated, while other
chunks are updated and the next forward pass begins, and the rest when they are used.

A chunk of frozen parameters is this and nothing more; what training adds is in `trained.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from optimus.comm import Group, Handle, InTurn
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.model.init import initialize_parameter
from optimus.model.parameters import Initial
from optimus.state.buffers import ManagedBuffer
from optimus.state.plan import ChunkPlan


class Chunk:
    """The parameters of `plan`; see the module's text.

    Flat buffers: `parameter` (compute type) of the whole chunk; of the part that this rank updates, which may be everything,
    `compute_shard` (compute type), fp32 `master`, and the `moments` of the update rule by kind. `compute_shard` is a view of
    what is kept of the long buffer; where a chunk has no master weights apart, `master` is `compute_shard`.

    `groups` are those of the steps in which the chunk is sharded.
    """

    def __init__(self, plan: ChunkPlan, groups: Sequence[Group], device: torch.device) -> None:
        self.plan = plan
        self.groups = [group.unwatched for group in groups]  # what is gathered here may be of others
        depths = plan.depths
        self._made = {
            each.kind: torch.zeros(plan.elements(each), dtype=each.dtype, device=device) for each in plan.buffers
        }
        self.parameter = self._made["parameters"]
        self._full_parameters = ManagedBuffer(self.parameter, "parameters", stays=not depths.parameters)
        self._parameter_shard = self._made.get("parameters.shard", self.parameter)  # between its uses
        self.compute_shard = self._parameter_shard[plan.within(depths.parameters, depths.optimizer)]
        self.master = self._made.get("master", self.compute_shard)
        self.moments = {kind: self._made[kind] for kind in plan.rule.kinds}
        self.parameters: list[nn.Parameter] = []  # of the module
        self.gradient_buffers: Mapping[nn.Parameter, GradientBuffer] = {}  # of those that are trained
        self._gathering = InTurn()
        self._depth = 0  # of the parameters that are here or coming

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """`saved_buffers`, which may be written to; `publish` must follow."""
        self.settle()
        return self.saved_buffers

    @property
    def saved_buffers(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds of this chunk, by the prefix of its keys: this rank's part of what is kept of it."""
        return {"model": self.master, **self.moments}

    @property
    def weights(self) -> Tensor:
        """This rank's part of the weights, as a checkpoint of them alone holds it: in the type of computation, if that is
        what is computed with."""
        return self.master if self.plan.rule.averages else self.compute_shard

    def hold(self, until: Handle) -> None:
        """Call `until`, once, before this rank's part changes: it returns when that has been copied."""

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) for every slot; the parameters are views of the buffer."""
        for name, view in self.views(self.parameter).items():
            self.parameters.append(nn.Parameter(view, requires_grad=self.plan.rule.trains))
            yield name, self.parameters[-1]
        self.reshard()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """By name, each parameter's view of a buffer of the whole chunk's size."""
        return {slot.name: whole[slot.start : slot.end].view(slot.shape) for slot in self.plan.slots}

    def initialize(self, initial: Mapping[str, Initial], seed: int, std: float) -> None:
        """Initial weights, of the kind that `initial` names, by name and position: each rank makes its own part."""
        part = self.plan.shard
        for slot in self.plan.slots:
            start, end = max(slot.start, part.start), min(slot.end, part.stop)
            if start < end:
                here = self.master[start - part.start : end - part.start]
                begin = start - slot.start
                initialize_parameter(slot.name, here, initial[slot.name], seed, std, begin, slot.global_positions)
        self.begin()
        self.publish()

    def begin(self) -> None:
        """Make what the update rule keeps as it is before the first update."""
        self.plan.rule.begin(self.master, [*self.moments.values()])

    # ---- Whole parameters ----

    @property
    def gathered(self) -> bool:
        """Whether the whole parameters are here."""
        return self._full_parameters.status == "here"

    def start_gather(self, depth: int = 0) -> None:
        """Begin to gather what is neither here nor coming of the extent of `depth`, from the parts of other ranks."""
        if depth == 0 < self._depth:
            self._full_parameters.go("gather")
        while self._depth > depth:
            self._depth -= 1
            self._gathering.add(partial(self._all_gather_async, self._depth))

    def _all_gather_async(self, depth: int) -> Handle:
        # By way of `data`: autograd must not take this for a change of what it has saved.
        whole, part = self._parameters_at(depth).data, self._parameters_at(depth + 1)
        return self.groups[depth].all_gather_async(whole, part, self.plan.lengths(depth))

    def _parameters_at(self, depth: int) -> Tensor:
        """The extent of `depth`, in the longest buffer that is sure to have it."""
        kept = self.plan.depths.parameters
        if depth < kept:
            return self.parameter[self.plan.extent(depth)]
        return self._parameter_shard[self.plan.within(kept, depth)]

    def gather(self) -> None:
        """Have the whole parameters here. All ranks of the groups must gather, in the same order."""
        self.start_gather()
        self.settle()

    def reshard(self) -> None:
        """Free the whole parameters where only a part is kept; the module's parameters stay views of them."""
        if self.plan.depths.parameters:
            self.settle()
            self._full_parameters.go("free")
            self._depth = max(self._depth, self.plan.depths.parameters)

    def settle(self) -> None:
        """Finish a gathering that is under way: it reads the parts that are about to change."""
        self._gathering.finish()
        if self._full_parameters.status == "coming":
            self._full_parameters.go("arrive")

    def publish(self) -> None:
        """Make the compute copies anew after the master weights have changed; begin to gather those that are kept."""
        self.settle()
        if self.master is not self.compute_shard:
            self.plan.rule.computed(self.master, [*self.moments.values()], self.compute_shard)
        self._invalidate_gathered()

    def show(self) -> None:
        """Compute with the weights themselves, as an evaluation does, where training does not; `publish` goes back."""
        if self.plan.rule.averages:
            self.settle()
            self.compute_shard.copy_(self.master)
            self._invalidate_gathered()

    def _invalidate_gathered(self) -> None:
        """This rank's part has changed: what others have of it, and this rank of theirs, is out of date."""
        if self.plan.shard_steps:
            self._full_parameters.go("free")
            self._depth = self.plan.depths.optimizer
            self.start_gather(self.plan.depths.parameters)
