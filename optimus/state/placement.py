"""Places the buffers of a chunk in memory of the device or the host, or on a disk, and maps them to checkpoint entries.

Some buffers of a pruned chunk are compressed (`masks.py`); this module also makes their dense forms.
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
    """The groups, transfers and options that a chunk works with, in addition to its plan."""

    groups: Sequence[Group]
    """The groups of the steps in which the chunk is sharded."""
    copies: Group
    """The replica group: the ranks that keep the same shard, whose gradients are summed last."""
    transfers: Transfers
    step: StepContext = field(default_factory=StepContext)
    """The step context, which may defer gradients."""
    file: StateFile | None = None
    """The state file on the disk."""
    block: int = 0
    """Bytes of the memory block that whole parameters get."""
    options: StateConfig = field(default_factory=StateConfig)
    blocks: Mapping[str, OverBlocks] = field(default_factory=dict)
    """The way to apply a rule's matrix function, by name of a parameter whose matrices are split into blocks over ranks."""
    started: Callable[[Any], None] = lambda reduction: None
    """Called with a reduction of gradients when the reduction has begun and holds memory."""


class Placement:
    """The buffers of `plan`: flat tensors.

    `parameter` (compute type) holds the whole chunk. The other buffers hold the shard that this rank updates, which may be
    the whole chunk. `compute_shard` (compute type) is a view of the kept parameters. The checkpointed buffers go by the
    prefix of their keys: fp32 master weights, "model", and the update rule's state, by kind. `resident` has those of them
    that are always in memory. Where a chunk has no separate master weights, `compute_shard` takes their place.

    `masks` are packed bits for the pruned parameters.
    """

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        self.groups = [group.unwatched for group in context.groups]  # gathered data may come from other ranks
        self.context, self.transfers, self.part = context, context.transfers, OwnPart()
        self.disk: DiskStates | None = None
        self._whole = self._make(plan, "whole")
        self.parameter = self._whole["parameters"]
        self.place(plan, masks or {})

    def _make(self, plan: ChunkPlan, *extents: str) -> dict[str, Tensor]:
        """Makes the buffers of these extents that are in memory, by kind."""
        return {
            each.kind: self.transfers.make(each, plan.elements(each))
            for each in plan.buffers
            if each.extent in extents and each.residency != "disk"
        }

    def place(self, plan: ChunkPlan, masks: Mapping[str, Tensor]) -> None:
        """Makes all buffers of `plan` except those of the whole chunk."""
        self.plan = plan
        self._made = self._whole | self._make(plan, "compressed", "mask")
        self.elements = AllElements()
        if plan.mask is not None:
            tile = self.context.options.tile if self.parameter.device.type == "cpu" else None
            self.elements = Mask(plan.mask, positions(plan, masks), self._made["mask"], tile)
        self.parameter_shard = self.buffer("parameters.shard", self.parameter)  # between its uses
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
        """Returns the checkpointed state by prefix: buffers that are always in memory, and buffers read `on_disk`, by
        kind."""
        made = {**self._made, **on_disk}
        if not self.plan.has_master:
            made["master"] = self.compute_shard
        kinds = {"model": "master", **{kind: kind for kind in self.plan.rule.kinds}}
        return {prefix: made[kind] for prefix, kind in kinds.items() if kind in made}

    def residency(self, prefix: str, weights: bool = False) -> Residency:
        """Returns the residency of the checkpoint entry with this prefix, in a full checkpoint or in one of `weights`
        alone."""
        if prefix != "model":
            return self.plan.residency(prefix)
        apart = self.plan.has_master and (not weights or self._computes_otherwise)
        return self.plan.residency("master" if apart else "parameters.shard")

    @property
    def _computes_otherwise(self) -> bool:
        """True if the compute weights are not simply this rank's shard of the weights: averaging or pruning makes them
        differ."""
        return self.plan.rule.averages or self.elements.prunes

    def weights(self, states: Mapping[str, Tensor]) -> Tensor:
        """Picks from `states` this rank's shard of the weights for a checkpoint of weights alone: the compute weights, if
        possible."""
        return states["model"] if self._computes_otherwise else self.compute_shard

    @property
    def weights_dtype(self) -> torch.dtype:
        """The type of the weights in a checkpoint of weights alone."""
        return torch.float32 if self.plan.rule.averages else self.compute_shard.dtype

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """Returns, by name, each parameter's view of a buffer of the whole chunk's size."""
        return {slot.name: whole[slot.start : slot.end].view(slot.shape) for slot in self.plan.slots}

    # ---- Dense forms of compressed buffers ----

    @property
    def dense_extent(self) -> slice:
        """The extent of this rank's shard in the dense chunk, pruned elements included; the extents of all shards cover the
        chunk."""
        borders = self.elements.borders(self.plan.borders)
        first, number = self.plan.shards(self.plan.depths.optimizer)
        return slice(borders[first], borders[first + number])

    def dense_part(self, part: Tensor) -> Tensor:
        """Returns the dense form, zero where pruned, of one of this rank's buffers or its copy on the host; unpruned buffers
        as is."""
        return self.elements.expanded(part, self.plan.shard.start, self.dense_extent)

    def fill_part(self, part: Tensor, dense: Tensor) -> None:
        """Fills one of this rank's buffers from `dense`: the dense form of the buffer, or that of the whole chunk."""
        first = 0 if len(dense) == self.plan.size else self.dense_extent.start
        source = self.elements.compressed(dense, self.plan.shard, first)
        if source.data_ptr() != part.data_ptr():
            part.copy_(source)


def positions(plan: ChunkPlan, masks: Mapping[str, Tensor]) -> Tensor:
    """Returns the positions of the unpruned elements in the whole chunk, int64."""
    found = []
    for slot in plan.slots:
        bits, size = masks.get(slot.name), slot.shape.numel()
        left = torch.arange(size) if bits is None else unpacked_bits(bits, size).nonzero().flatten()
        found.append(left + slot.start)
    return torch.cat(found)
