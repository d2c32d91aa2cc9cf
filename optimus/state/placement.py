"""Places the buffers of a chunk in memory of the device or the host, or on a disk, and maps buffers to checkpoint
entries.

Some buffers of a pruned chunk are compressed (`masks.py`); this module also converts them to their dense forms and back.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optimus.comm import Group
from optimus.config.tree import StateConfig
from optimus.state.buffers import Residency
from optimus.state.disk import DiskStates, StateFile
from optimus.state.masks import AllElements, Mask, unpacked_bits
from optimus.state.matrices import OverBlocks
from optimus.state.plan import ChunkPlan
from optimus.state.statuses import OwnPart
from optimus.state.transfers import Transfers
from optimus.step_context import StepContext

NOTHING_ON_DISK: AbstractContextManager[Mapping[str, Tensor]] = nullcontext({})


@dataclass(frozen=True)
class ChunkContext:
    """The groups, transfers and options that a chunk needs in addition to its plan."""

    groups: Sequence[Group]
    """The process group of each sharding step of the chunk."""
    copies: Group
    """The replica group of a trained chunk: the ranks that store the same shard. The last all-reduce sums the gradients
    of these ranks."""
    transfers: Transfers
    step: StepContext = field(default_factory=StepContext)
    """The step context, which identifies the current backward pass and may defer weight gradients."""
    file: StateFile | None = None
    """The state file of this rank; None without state on a disk."""
    block: int = 0
    """The minimum number of bytes that whole parameters allocate on the device."""
    options: StateConfig = field(default_factory=StateConfig)
    blocks: Mapping[str, OverBlocks] = field(default_factory=dict)
    """For each parameter whose matrices are split into blocks over ranks, by name: the object that applies a matrix function
    to the whole matrices."""
    started: Callable[[Any], None] = lambda reduction: None
    """A callback, which gets each `GradientReduction` that has begun."""


class Placement:
    """The buffers of `plan`: flat tensors.

    `parameter` (compute type) holds the whole chunk. `compute_shard` (compute type) is a view of the stored parameters:
    the shard that this rank updates, which may be the whole chunk. Checkpointed buffers have the length of
    `compute_shard`. The key prefix of the master weights is "model", and the key prefix of an update rule's buffer is
    the buffer's kind. `resident` maps prefixes to the checkpointed buffers that are not on a disk. A chunk without
    separate master weights checkpoints `compute_shard` under "model".

    `masks` are packed bits for the pruned parameters.
    """

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        # The groups have no watch, because a rank may also send data that it has all-gathered from other ranks.
        self.groups = [group.unwatched for group in context.groups]
        self.context, self.transfers, self.part = context, context.transfers, OwnPart()
        self.disk: DiskStates | None = None
        self._dense = self._make(plan, "dense")
        self.parameter = self._dense["parameters"]
        self.allocate(plan, masks or {})

    def _make(self, plan: ChunkPlan, *extents: str) -> dict[str, Tensor]:
        """Allocates the buffers outside the disk whose extent is one of `extents`, and returns the buffers by kind."""
        return {
            each.kind: self.transfers.make(each, plan.elements(each))
            for each in plan.buffers
            if each.extent in extents and each.residency != "disk"
        }

    def allocate(self, plan: ChunkPlan, masks: Mapping[str, Tensor]) -> None:
        """Allocates all buffers of `plan` except buffers of the extent "dense", which stay."""
        self.plan = plan
        self._made = self._dense | self._make(plan, "compressed", "mask")
        self.elements = AllElements()
        if plan.mask is not None:
            tile = self.context.options.tile if self.parameter.device.type == "cpu" else None
            self.elements = Mask(plan.mask, positions(plan, masks), self._made["mask"], tile)
        self.parameter_shard = self.buffer("parameters.shard", self.parameter)  # the stored parameters between uses
        self.compute_shard = self.parameter_shard[plan.within(plan.depths.parameters, plan.depths.optimizer)]
        on_disk = [each.kind for each in plan.buffers if each.residency == "disk"]
        if on_disk and self.disk is not None:
            self.disk.resize(on_disk, plan.updated)
        elif on_disk and self.context.file is not None:
            self.disk = DiskStates(self.context.file, on_disk, plan.updated)
        self.resident = self.by_prefix({})

    def buffer(self, kind: str, otherwise: Tensor) -> Tensor:
        """Returns the buffer of a kind, or `otherwise` if the chunk has none in memory."""
        return self._made.get(kind, otherwise)

    def by_prefix(self, on_disk: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the checkpointed state by prefix: buffers in memory, and the buffers `on_disk`, which the caller has read
        from the disk and gives by kind."""
        made = {**self._made, **on_disk}
        if not self.plan.has_master:
            made["master"] = self.compute_shard
        kinds = {"model": "master", **{kind: kind for kind in self.plan.rule.kinds}}
        return {prefix: made[kind] for prefix, kind in kinds.items() if kind in made}

    def residency(self, prefix: str, weights: bool = False) -> Residency:
        """Returns the location (device, host or disk) of the buffer that a checkpoint stores under `prefix`; `weights`
        means a checkpoint of weights alone."""
        if prefix != "model":
            return self.plan.residency(prefix)
        apart = self.plan.has_master and (not weights or self._computes_otherwise)
        return self.plan.residency("master" if apart else "parameters.shard")

    @property
    def _computes_otherwise(self) -> bool:
        """True if averaging or pruning makes the compute weights differ, beyond rounding, from this rank's shard of the
        master weights."""
        return self.plan.rule.averages or self.elements.prunes

    def weights(self, states: Mapping[str, Tensor]) -> Tensor:
        """Returns this rank's shard of the weights for a checkpoint of weights alone.

        The result is the compute weights, or the master weights from `states` where averaging or pruning makes the
        compute weights differ.
        """
        return states["model"] if self._computes_otherwise else self.compute_shard

    @property
    def weights_dtype(self) -> torch.dtype:
        """The type of the weights in a checkpoint of weights alone."""
        return torch.float32 if self.plan.rule.averages else self.compute_shard.dtype

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Returns, by name, each parameter's view of a buffer of the whole chunk's size."""
        return {slot.name: buffer[slot.start : slot.end].view(slot.shape) for slot in self.plan.slots}

    # ---- Dense forms of compressed buffers ----

    @property
    def dense_extent(self) -> slice:
        """The elements of the dense chunk that this rank's shard covers, including pruned elements. All shards together
        cover the chunk."""
        borders = self.elements.borders(self.plan.borders)
        first, number = self.plan.shards(self.plan.depths.optimizer)
        return slice(borders[first], borders[first + number])

    def dense_part(self, part: Tensor) -> Tensor:
        """Returns the dense form, zero where pruned, of `part`: one of this rank's buffers or its copy on the host. Returns
        `part` itself if nothing is pruned."""
        return self.elements.expanded(part, self.plan.shard.start, self.dense_extent)

    def fill_part(self, part: Tensor, dense: Tensor) -> None:
        """Fills `part`, one of this rank's buffers, from `dense`: the dense form of the buffer or of the whole chunk."""
        first = 0 if len(dense) == self.plan.size else self.dense_extent.start
        source = self.elements.compressed(dense, self.plan.shard, first)
        if source.data_ptr() != part.data_ptr():
            part.copy_(source)


def positions(plan: ChunkPlan, masks: Mapping[str, Tensor]) -> Tensor:
    """Returns the positions of the unpruned elements in the whole chunk, int64."""
    found = []
    for slot in plan.slots:
        bits, size = masks.get(slot.name), slot.shape.numel()
        local = torch.arange(size) if bits is None else unpacked_bits(bits, size).nonzero().flatten()
        found.append(local + slot.start)
    return torch.cat(found)
