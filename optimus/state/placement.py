"""Where the buffers of a chunk are: in memory of the device or the host, or on a disk; and what a checkpoint has of them.

Of a pruned chunk parts are compressed (`masks.py`): here are their dense forms, too.
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
    """What a chunk works with beside its plan."""

    groups: Sequence[Group]
    """Of the steps in which it is sharded."""
    copies: Group
    """The ranks that keep the same part of it, whose gradients are summed last."""
    transfers: Transfers
    step: StepContext = field(default_factory=StepContext)
    """May defer gradients."""
    file: StateFile | None = None
    """On the disk."""
    block: int = 0
    """Bytes that whole parameters are given."""
    options: StateConfig = field(default_factory=StateConfig)
    blocks: Mapping[str, OverBlocks] = field(default_factory=dict)
    """By name of a parameter of which ranks have blocks of each matrix, how a rule's function of matrices is applied."""
    started: Callable[[Any], None] = lambda reduction: None
    """Called with it when a reduction of gradients that holds memory has begun."""


class Placement:
    """The buffers of `plan`: flat tensors.

    `parameter` (compute type) of the whole chunk; of the part that this rank updates, which may be everything,
    `compute_shard` (compute type), a view of what is kept of the long buffer, and what a checkpoint holds, by the prefix of
    its keys: fp32 master weights, "model", and what the update rule keeps, by kind. Of that `resident` has what is always in
    memory. Where a chunk has no master weights apart, they are `compute_shard`.

    Of those parameters that are pruned `masks` are packed bits.
    """

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        self.groups = [group.unwatched for group in context.groups]  # what is gathered here may be of others
        self.context, self.transfers, self.part = context, context.transfers, OwnPart()
        self.disk: DiskStates | None = None
        self._whole = self._make(plan, "whole")
        self.parameter = self._whole["parameters"]
        self.place(plan, masks or {})

    def _make(self, plan: ChunkPlan, *extents: str) -> dict[str, Tensor]:
        """The buffers of these extents that are in memory, by kind."""
        return {
            each.kind: self.transfers.make(each, plan.elements(each))
            for each in plan.buffers
            if each.extent in extents and each.residency != "disk"
        }

    def place(self, plan: ChunkPlan, masks: Mapping[str, Tensor]) -> None:
        """Make all buffers of `plan` but those of the whole chunk."""
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
        """That of a kind, where there is one."""
        return self._made.get(kind, otherwise)

    def by_prefix(self, on_disk: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds, of what is always in memory and what has been read `on_disk`, by kind."""
        made = {**self._made, **on_disk}
        if not self.plan.has_master:
            made["master"] = self.compute_shard
        kinds = {"model": "master", **{kind: kind for kind in self.plan.rule.kinds}}
        return {prefix: made[kind] for prefix, kind in kinds.items() if kind in made}

    def residency(self, prefix: str, weights: bool = False) -> Residency:
        """Where that of a checkpoint is which has this prefix: of the whole state, or of `weights` alone."""
        if prefix != "model":
            return self.plan.residency(prefix)
        apart = self.plan.has_master and (not weights or self._computes_otherwise)
        return self.plan.residency("master" if apart else "parameters.shard")

    @property
    def _computes_otherwise(self) -> bool:
        """Whether what is computed with is not this rank's part of the weights: something else, or whole."""
        return self.plan.rule.averages or self.elements.prunes

    def weights(self, states: Mapping[str, Tensor]) -> Tensor:
        """Of `states`, this rank's part of the weights, which a checkpoint of them alone takes: what is computed with, where
        it can."""
        return states["model"] if self._computes_otherwise else self.compute_shard

    @property
    def weights_dtype(self) -> torch.dtype:
        """The type in which a checkpoint of weights alone has them."""
        return torch.float32 if self.plan.rule.averages else self.compute_shard.dtype

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """By name, each parameter's view of a buffer of the whole chunk's size."""
        return {slot.name: whole[slot.start : slot.end].view(slot.shape) for slot in self.plan.slots}

    # ---- The dense form of what is compressed ----

    @property
    def dense_extent(self) -> slice:
        """What of the whole chunk this rank's part is, pruned elements included; those of all parts are the chunk."""
        borders = self.elements.borders(self.plan.borders)
        first, number = self.plan.shards(self.plan.depths.optimizer)
        return slice(borders[first], borders[first + number])

    def dense_part(self, part: Tensor) -> Tensor:
        """Of one of this rank's buffers, or a copy on the host: itself, or its dense form, zero where it is pruned."""
        return self.elements.expanded(part, self.plan.shard.start, self.dense_extent)

    def fill_part(self, part: Tensor, dense: Tensor) -> None:
        """Put into one of this rank's buffers what `dense` has: its dense form, or that of the chunk."""
        first = 0 if len(dense) == self.plan.size else self.dense_extent.start
        source = self.elements.compressed(dense, self.plan.shard, first)
        if source.data_ptr() != part.data_ptr():
            part.copy_(source)


def positions(plan: ChunkPlan, masks: Mapping[str, Tensor]) -> Tensor:
    """Where in the whole chunk its unpruned elements are, int64."""
    found = []
    for slot in plan.slots:
        bits, size = masks.get(slot.name), slot.shape.numel()
        left = torch.arange(size) if bits is None else unpacked_bits(bits, size).nonzero().flatten()
        found.append(left + slot.start)
    return torch.cat(found)
