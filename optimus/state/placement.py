"""Places the buffers of a chunk in memory of the device or the host, or on a disk, and maps buffers to checkpoint
entries."""

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
    """The groups, transfers, files and options that a chunk needs in addition to its plan."""

    groups: Sequence[Group]
    """The process group of each sharding step of the chunk."""
    copies: Group
    """The ranks that store the same shard of a trained chunk."""
    transfers: Transfers
    step: StepContext = field(default_factory=StepContext)
    """The step context, which identifies the current backward pass."""
    file: StateFile | None = None
    """The state file of this rank; None without state on a disk."""
    block: int = 0
    """The minimum number of bytes to allocate on the device for the chunk's unsharded parameters."""
    options: StateConfig = field(default_factory=StateConfig)
    blocks: Mapping[str, OverBlocks] = field(default_factory=dict)
    """By parameter name: an `OverBlocks` for matrices whose rows or columns are split over ranks."""
    started: Callable[[Any], None] = lambda reduction: None
    """A callback for each `GradientReduction` that has begun."""


class Placement:
    """The buffers of `plan`; the buffers in memory are flat tensors.

    `parameter` (compute dtype) is the buffer for the unsharded parameters. `compute_shard` is a view of this
    rank's shard of the compute weights. `resident` maps checkpoint prefixes to the state in memory: "model" to the
    weights, and each kind of optimizer state to its buffer. `masks` are packed bits by parameter name.
    """

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        # Unwatched groups, because a rank may also send data that it has all-gathered from other ranks.
        self.groups = [group.unwatched for group in context.groups]
        self.context, self.transfers, self.part = context, context.transfers, OwnPart()
        self.disk: DiskStates | None = None
        self._dense = self._make(plan, "dense")
        self.parameter = self._dense["parameters"]
        self.allocate(plan, masks or {})

    def _make(self, plan: ChunkPlan, *extents: str) -> dict[str, Tensor]:
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
        self.parameter_shard = self.buffer("parameters.shard", self.parameter)
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
        """Returns the checkpointed state by prefix. `on_disk` has, by kind, the buffers that the caller has read from
        the disk."""
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
        """True if averaging or pruning may make the compute weights differ, beyond rounding, from the master
        weights."""
        return self.plan.rule.averages or self.elements.prunes

    def weights(self, states: Mapping[str, Tensor]) -> Tensor:
        """Returns this rank's shard of the weights for a checkpoint of weights alone; `states` is the state by
        prefix."""
        return states["model"] if self._computes_otherwise else self.compute_shard

    @property
    def weights_dtype(self) -> torch.dtype:
        """The type of the weights in a checkpoint of weights alone."""
        return torch.float32 if self.plan.rule.averages else self.compute_shard.dtype

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Returns, by name, each parameter's view of a buffer of the whole chunk's size."""
        return {slot.name: buffer[slot.start : slot.end].view(slot.shape) for slot in self.plan.slots}

    # ---- Dense forms ----

    @property
    def dense_extent(self) -> slice:
        """The elements of the dense chunk that this rank's shard covers, including pruned elements."""
        borders = self.elements.borders(self.plan.borders)
        first, number = self.plan.shards(self.plan.depths.optimizer)
        return slice(borders[first], borders[first + number])

    def dense_part(self, part: Tensor) -> Tensor:
        """Returns the dense form of `part`, a buffer of this rank's shard. Pruned elements are zero. Without a mask,
        returns `part` itself."""
        return self.elements.expanded(part, self.plan.shard.start, self.dense_extent)

    def fill_part(self, part: Tensor, dense: Tensor) -> None:
        """Fills `part`, a buffer of this rank's shard, from `dense`: the dense form of the buffer or of the whole
        chunk."""
        first = 0 if len(dense) == self.plan.size else self.dense_extent.start
        source = self.elements.compressed(dense, self.plan.shard, first)
        if source.data_ptr() != part.data_ptr():
            part.copy_(source)


def positions(plan: ChunkPlan, masks: Mapping[str, Tensor]) -> Tensor:
    """Returns the int64 positions of the unpruned elements in the dense chunk.

    `masks` are packed bits by parameter name. Parameters without a mask are not pruned.
    """
    found = []
    for slot in plan.slots:
        bits, size = masks.get(slot.name), slot.shape.numel()
        local = torch.arange(size) if bits is None else unpacked_bits(bits, size).nonzero().flatten()
        found.append(local + slot.start)
    return torch.cat(found)
