"""A chunk: parameters laid end to end in flat buffers, with their fp32 master weights and what an update rule keeps.

The module's parameters are views of the chunk's compute buffer, so that gathering, updating and saving are operations on a
few long tensors, whatever the model. All parameters of a chunk have the same replicas and the same rule. The replicas shard
the chunk in steps (`plan.py`): each rank keeps some part of each buffer (`buffers.py`).

Parameters that are not kept whole have memory while they are used: from when a module needs them (`gathering.py`). They are
gathered in the steps in which they are sharded, backwards; first those parts that other ranks have updated, while other
chunks are updated and the next forward pass begins, and the rest when they are used. What the host keeps of them is fetched
before.

A chunk of frozen parameters is this and nothing more; what training adds is in `trained.py`. Of a pruned one (`masks.py`)
parts are compressed, and whole parameters are expanded, in place, when they have been gathered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optimus.comm import Group, Handle, InTurn
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.model.init import initialize_parameter
from optimus.model.parameters import Initial
from optimus.state.buffers import ManagedBuffer, Residency
from optimus.state.disk import DiskStates, StateFile
from optimus.state.masks import AllElements, Mask, unpacked_bits
from optimus.state.matrices import OverBlocks
from optimus.state.plan import ChunkPlan
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
    tile: int | None = None
    """Elements by which a pruned chunk is compressed at a time."""
    blocks: Mapping[str, OverBlocks] = field(default_factory=dict)
    """By name of a parameter of which ranks have blocks of each matrix, how a rule's function of matrices is applied."""
    piece: int | None = None
    """Elements per all-reduce of gradients."""
    started: Callable[[Any], None] = lambda chunk: None
    """Called with the chunk when a reduction that holds memory has begun."""
    update_on: Residency = "device"
    """Where state that is elsewhere is updated: device or host."""


class Chunk:
    """The parameters of `plan`; see the module's text.

    Flat buffers: `parameter` (compute type) of the whole chunk; of the part that this rank updates, which may be everything,
    `compute_shard` (compute type), a view of what is kept of the long buffer, and what a checkpoint holds, by the prefix of
    its keys: fp32 master weights, "model", and what the update rule keeps, by kind. Of that `resident` has what is always in
    memory. Where a chunk has no master weights apart, they are `compute_shard`.

    Whoever reads what a checkpoint holds, or changes it, does so inside `states`, which waits for the update that is under
    way and gives each thread buffers of its own for what is on a disk.

    Of those parameters that are pruned `masks` are packed bits.
    """

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        self.groups = [group.unwatched for group in context.groups]  # what is gathered here may be of others
        self._context, self._transfers = context, context.transfers
        self._disk: DiskStates | None = None
        self._whole = {
            each.kind: self._transfers.make(each, plan.elements(each))
            for each in plan.buffers
            if each.extent == "whole"
        }
        self.parameter = self._whole["parameters"]
        resize = self._transfers.resize
        self._full_parameters = ManagedBuffer(
            self.parameter, "parameters", stays=plan.keeps_whole, block=context.block, resize=resize
        )
        self._plan_parts(plan, context.file, masks or {})
        self.parameters: list[nn.Parameter] = []  # of the module
        self.gradient_buffers: Mapping[nn.Parameter, GradientBuffer] = {}  # of those that are trained
        self._gathering = InTurn()
        self._updating: Handle | None = None  # an update of this rank's part that nobody has waited for yet
        self._depth = 0  # of the parameters that are here or coming

    def _plan_parts(self, plan: ChunkPlan, file: StateFile | None, masks: Mapping[str, Tensor]) -> None:
        """Make all buffers of `plan` but those of the whole chunk."""
        self.plan = plan
        depths, on_disk = plan.depths, [each.kind for each in plan.buffers if each.residency == "disk"]
        self._made = self._whole | {
            each.kind: self._transfers.make(each, plan.elements(each))
            for each in plan.buffers
            if each.kind not in on_disk and each.kind not in self._whole
        }
        self.elements = AllElements()
        if plan.mask is not None:
            self.elements = Mask(plan.mask, _positions(plan, masks), self._made["mask"], self._context.tile)
        self._parameter_shard = self._made.get("parameters.shard", self.parameter)  # between its uses
        self._fetched = plan.residency("parameters.shard") != "device"
        self.compute_shard = self._parameter_shard[plan.within(depths.parameters, depths.optimizer)]
        if on_disk and self._disk is not None:
            self._disk.resize(on_disk, plan.updated)
        elif on_disk and file is not None:
            self._disk = DiskStates(file, on_disk, plan.updated)
        self.resident = self._by_prefix({})

    def _by_prefix(self, on_disk: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds, of what is always in memory and what has been read `on_disk`, by kind."""
        made = {**self._made, **on_disk}
        if not self.plan.has_master:
            made["master"] = self.compute_shard
        kinds = {"model": "master", **{kind: kind for kind in self.plan.rule.kinds}}
        return {prefix: made[kind] for prefix, kind in kinds.items() if kind in made}

    @property
    def master(self) -> Tensor:
        """This rank's part of the master weights, where they are always in memory."""
        return self.resident["model"]

    @contextmanager
    def states(self, change: bool = False, *, after: Handle | None = None) -> Iterator[Mapping[str, Tensor]]:
        """Inside, what a checkpoint holds of this chunk is in memory, by the prefix of its keys: this rank's part, behind
        the update that is under way. With `change` it may be written to, behind whoever copies it; `publish` must follow.

        Only the thread that trains knows what is under way: another waits for the `updated` that it was given, `after`.
        """
        if after is not None:
            after()
        elif change:
            self.settle()
            self._finish_reading()
        else:
            self._finish_update()
        self._transfers.synchronize()
        loaded = NOTHING_ON_DISK if self._disk is None else self._disk.loaded(change)
        with loaded as on_disk:
            yield self._by_prefix(on_disk)

    def residency(self, prefix: str, weights: bool = False) -> Residency:
        """Where that of a checkpoint is which has this prefix: of the whole state, or of `weights` alone."""
        if prefix != "model":
            return self.plan.residency(prefix)
        apart = self.plan.has_master and (not weights or self._computes_otherwise)
        return self.plan.residency("master" if apart else "parameters.shard")

    @property
    def updated(self) -> Handle:
        """Waits for the update that is under way now; any thread may call it."""
        return self._transfers.synchronize

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

    def hold(self, until: Handle, weights: bool = False) -> None:
        """Call `until`, once, before the next update changes this rank's part: it returns when that has been copied or
        written. `weights`: what is computed with is copied, too."""

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

    def gathered_state(self, prefix: str) -> Tensor:
        """The whole chunk's state with this prefix of a checkpoint, fp32 on the device. All ranks of its groups call."""
        self.settle()
        whole = torch.zeros(self.plan.size, dtype=torch.float32, device=self.parameter.device)
        with self.states() as states:
            whole[self.plan.shard] = states[prefix].to(whole.device)
        for depth in reversed(range(self.plan.depths.optimizer)):
            outer, inner = whole[self.plan.extent(depth)], whole[self.plan.extent(depth + 1)]
            self.groups[depth].all_gather_async(outer, inner, self.plan.lengths(depth))()
        self.elements.expand(whole, self.plan.borders[-1], fresh=False)
        return whole

    def prune(self, plan: ChunkPlan, masks: Mapping[str, Tensor], *, empty: bool = False) -> None:
        """Go on with `plan`, of the same parameters, of which some are pruned by `masks`. Between steps; all ranks of the
        groups must call. The state of the unpruned elements stays; none is there if `empty`."""
        self.settle()
        with self.states() as states:
            prefixes = [] if empty else [*states]
        positions = _positions(plan, masks)[plan.shard]
        parts = {prefix: self.gathered_state(prefix)[positions.to(self.parameter.device)] for prefix in prefixes}
        self._plan_parts(plan, None, masks)
        with self.states(change=True) as states:
            for prefix, part in parts.items():
                states[prefix][: len(part)] = part.to(states[prefix].device)
                states[prefix][len(part) :].zero_()
        if plan.keeps_whole:
            self.parameter.zero_()
        if not empty:
            self.publish()

    # ---- Whole parameters ----

    @property
    def gathered(self) -> bool:
        """Whether the whole parameters are here."""
        return self._full_parameters.status == "here"

    @property
    def holds_block(self) -> bool:
        """Whether the whole parameters have memory."""
        return self._full_parameters.status != "absent"

    def start_gather(self, depth: int = 0) -> None:
        """Begin to gather what is neither here nor coming of the extent of `depth`, from the host and the parts of other
        ranks; behind an update that is under way."""
        fetches = self._fetched and depth == 0 and self._full_parameters.status == "absent"
        gathers = self._depth > depth
        expands = self.elements.prunes and depth == 0 and self._full_parameters.status == "absent"
        gathers = gathers or (expands and not fetches)
        if not (fetches or gathers):
            return
        updating, turn = self._updating, self._gathering
        if updating is not None:
            turn.add(lambda: updating)
        if fetches:
            self._full_parameters.go("fetch")
            turn.add(self._fetch)
        if gathers and depth == 0:
            self._full_parameters.go("gather")
        while self._depth > depth:
            self._depth -= 1
            turn.add(partial(self._all_gather_async, self._depth))
        if updating is not None:
            self._transfers.advance(turn)
        if fetches and gathers:
            self._transfers.advance(turn)

    def _finish_update(self) -> None:
        """Wait for an update that is under way."""

    def _finish_reading(self) -> None:
        """Wait for whoever copies or writes this rank's part beside the training."""

    def _fetch(self) -> Handle:
        own = self.parameter.data[self.plan.extent(self.plan.depths.parameters)]
        return self._transfers.up(own, self._parameter_shard)

    def _all_gather_async(self, depth: int) -> Handle:
        # By way of `data`: autograd must not take this for a change of what it has saved.
        whole, part = self._parameters_at(depth).data, self._parameters_at(depth + 1)
        return self.groups[depth].all_gather_async(whole, part, self.plan.lengths(depth))

    def _parameters_at(self, depth: int) -> Tensor:
        """The extent of `depth`, in the longest buffer that is sure to have it."""
        kept = self.plan.depths.parameters
        if depth < kept or self._fetched:
            return self.parameter[self.plan.extent(depth)]
        return self._parameter_shard[self.plan.within(kept, depth)]

    def gather(self) -> None:
        """Have the whole parameters here. All ranks of the groups must gather, in the same order."""
        self.start_gather()
        self.settle()

    def reshard(self) -> None:
        """Free the whole parameters where they are kept otherwise; the module's parameters stay views of them."""
        if not self.plan.keeps_whole:
            self.settle()
            self._full_parameters.go("free")
            self._depth = max(self._depth, self.plan.depths.parameters)

    def settle(self) -> None:
        """Finish a gathering that is under way, which reads the parts that are about to change, and an update."""
        self._finish_update()
        self._gathering.finish()
        if self._full_parameters.status in ("fetching", "coming"):
            self._full_parameters.go("arrive")
            # By way of `data`: autograd must not take this for a change of what it has saved.
            self.elements.expand(self.parameter.data, self.plan.borders[-1], fresh=not self.plan.keeps_whole)

    def publish(self) -> None:
        """Make the compute copies anew after the master weights have changed; begin to gather those that are kept."""
        self.settle()
        self._compute_anew()
        self._invalidate_gathered()

    def _compute_anew(self) -> None:
        """Make the compute copy of this rank's part of the master weights."""
        if self.plan.has_master:
            with self.states() as states:
                weights, *kept = states.values()
                self.plan.rule.computed(weights, kept, self.compute_shard)

    def show(self) -> None:
        """Compute with the weights themselves, as an evaluation does, where training does not; `publish` goes back.

        No checkpoint that is being written has what such a rule computes with.
        """
        if self.plan.rule.averages:
            self.settle()
            with self.states() as states:
                self.compute_shard.copy_(states["model"])
            self._invalidate_gathered()

    def _invalidate_gathered(self) -> None:
        """This rank's part has changed: what others have of it, and this rank of theirs, is out of date."""
        if self.plan.shard_steps or self._fetched or self.elements.prunes:
            self._full_parameters.go("free")
            self._depth = self.plan.depths.optimizer
            if not self.plan.offloaded:  # else by whoever uses them, behind the update
                self.start_gather(self.plan.depths.parameters)


def _positions(plan: ChunkPlan, masks: Mapping[str, Tensor]) -> Tensor:
    """Where in the whole chunk its unpruned elements are, int64."""
    found = []
    for slot in plan.slots:
        bits, size = masks.get(slot.name), slot.shape.numel()
        left = torch.arange(size) if bits is None else unpacked_bits(bits, size).nonzero().flatten()
        found.append(left + slot.start)
    return torch.cat(found)
