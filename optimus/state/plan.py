"""Plans the division of parameters into chunks and of chunks over ranks: pure arithmetic, for any rank of any mesh.

`ModelState` allocates the buffers of a plan. Checks and the planner ask the same plan for bytes without allocating anything.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from optimus.config.tree import StateConfig, shard_widths
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh, RankPartition
from optimus.optim.rule import Rule
from optimus.state.buffers import ALIGN, KINDS, RESIDENCES, Buffer, Lifetime, Residency, ShardDepths, aligned, buffers
from optimus.state.masks import MaskForm, MaskPlan, bits_of
from optimus.state.tiling import TILINGS, Tiling

Sizes = npt.NDArray[np.int64]
Shard = Literal["none", "optimizer", "gradients", "parameters"]

_SMALLEST, _LARGEST = 1 << 22, 1 << 26  # range of chunk sizes: long enough for a network, small compared to a device
_SIZES = 240  # number of sizes that the search tries
_CHUNKS = 8  # minimum per model, unless chunks would be too small: others are communicated while one is used


@dataclass(frozen=True)
class ParameterSlot:
    """The place of this rank's slice of one parameter in its chunk: elements `start` to `end`.

    The slot reaches up to `limit`, which leaves room for the largest slice that any rank has. Therefore all ranks have the
    same chunk layout.
    """

    name: str
    layout: Layout
    region: tuple[slice, ...]  # of the global tensor
    start: int
    limit: int

    @property
    def end(self) -> int:
        """The element behind this rank's slice."""
        return self.start + self.shape.numel()

    @property
    def shape(self) -> torch.Size:
        """The shape of this rank's slice."""
        return _shape(self.region)

    def global_positions(self, local: Tensor) -> Tensor:
        """Row-major positions in the global tensor of row-major positions `local` (int64) in this rank's slice."""
        if not self.layout.sharded_dims:
            return local
        positions, stride = torch.zeros_like(local), 1
        for part, whole in zip(reversed(self.region), reversed(self.layout.shape)):
            size = part.stop - part.start
            positions += (local % size + part.start) * stride
            local, stride = local // size, stride * whole
        return positions


def _shape(region: Sequence[slice]) -> torch.Size:
    return torch.Size(part.stop - part.start for part in region)


class ShardStep(NamedTuple):
    """One of the steps in which a chunk is sharded: over `ranks` ranks; this rank gets shard number `group_rank`."""

    ranks: int
    group_rank: int


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk: parameters with the same replicas and rule, sharded in steps. `replica_count` ranks keep the same shard.

    A pruned chunk has a `mask`, and its extents, lengths and borders count compressed elements.
    """

    slots: tuple[ParameterSlot, ...]
    partial_axes: tuple[str, ...]
    rule: Rule
    borders: Sequence[int]  # starts of the shards after the last step, and the end of the last shard
    shard_steps: tuple[ShardStep, ...]
    replica_count: int
    depths: ShardDepths
    buffers: tuple[Buffer, ...]  # made by `buffers.buffers` for these depths
    mask: MaskPlan | None = None

    @property
    def size(self) -> int:
        """Elements of the whole chunk, including the padding of the last shard."""
        return self.borders[-1] if self.mask is None else self.mask.size

    @property
    def shard_count(self) -> int:
        """Number of shards of the chunk after the last step."""
        return len(self.borders) - 1

    @property
    def length(self) -> int:
        """Elements of a shard after the last step; the mean where shards differ in length."""
        return self.borders[-1] // self.shard_count

    def extent(self, depth: int) -> slice:
        """Returns the elements of the chunk that this rank has after `depth` steps."""
        first, number = self.shards(depth)
        return slice(self.borders[first], self.borders[first + number])

    def lengths(self, depth: int) -> list[int]:
        """Returns the number of elements that each rank of step `depth` gets from the extent that the step divides."""
        first, number = self.shards(depth)
        ends = self.borders[first : first + number + 1 : number // self.shard_steps[depth].ranks]
        return [end - start for start, end in pairwise(ends)]

    def shards(self, depth: int) -> tuple[int, int]:
        """Returns the first shard of the extent of `depth`, and the number of shards in that extent."""
        first, number = 0, self.shard_count
        for share in self.shard_steps[:depth]:
            number //= share.ranks
            first += share.group_rank * number
        return first, number

    def within(self, depth: int, part: int) -> slice:
        """Returns the extent of depth `part` relative to the extent of `depth`, which contains it."""
        outer, inner = self.extent(depth), self.extent(part)
        return slice(inner.start - outer.start, inner.stop - outer.start)

    def elements(self, buffer: Buffer) -> int:
        """Returns the number of elements of a buffer of this chunk."""
        if self.mask is not None and buffer.extent != "compressed":
            return self.mask.size if buffer.extent == "whole" else self.mask.elements
        if buffer.depth == 0:
            return self.borders[-1]
        extent = self.extent(buffer.depth)
        return extent.stop - extent.start

    @property
    def tiling(self) -> Tiling:
        """The tiling of the chunk, as its rule names it."""
        return TILINGS[self.rule.tiling]

    @property
    def align(self) -> int:
        """The largest alignment that any of its buffers needs, in elements."""
        return max(buffer.align for buffer in self.buffers)

    @property
    def lifetime(self) -> Lifetime:
        """The time during which the whole parameters have memory."""
        return self.buffers[0].lifetime

    @property
    def keeps_whole(self) -> bool:
        """True if the device keeps the whole parameters."""
        return self.stays("parameters")

    def residency(self, kind: str) -> Residency:
        """Returns the residency of a buffer; "device" if the chunk has no buffer of this kind."""
        return next((buffer.residency for buffer in self.buffers if buffer.kind == kind), "device")

    def stays(self, kind: str) -> bool:
        """Returns whether the device always has a buffer of this kind."""
        return any(buffer.kind == kind and buffer.lifetime == "always" for buffer in self.buffers)

    @property
    def has_master(self) -> bool:
        """True if the master weights are a buffer apart from the compute weights."""
        return any(buffer.kind == "master" for buffer in self.buffers)

    @property
    def model_dtype(self) -> torch.dtype:
        """The type of the weights in a full checkpoint."""
        return torch.float32 if self.rule.trains else self.buffers[0].dtype

    @property
    def adds_gradients(self) -> bool:
        """True if the gradients of each microbatch are added to a buffer that holds only a shard or the unpruned
        elements."""
        return any(buffer.kind == "gradients.shard" for buffer in self.buffers)

    @property
    def sends_gradients(self) -> bool:
        """True if the gradients of each microbatch are added to the gradients on the host."""
        used = any(buffer.kind == "gradients" and buffer.lifetime == "use" for buffer in self.buffers)
        return used and not self.adds_gradients

    @property
    def offloaded(self) -> bool:
        """True if some buffer of the chunk does not reside on the device."""
        return any(buffer.residency != "device" for buffer in self.buffers)

    @property
    def shard(self) -> slice:
        """The elements of the chunk that this rank's optimizer updates."""
        return self.extent(self.depths.optimizer)

    @property
    def updated(self) -> int:
        """The number of elements that this rank's optimizer updates."""
        return self.shard.stop - self.shard.start

    @property
    def block(self) -> int:
        """Bytes of the whole parameters."""
        return self.buffers[0].bytes(self.size)

    def bytes_by_kind(self, residency: Residency = "device") -> dict[str, int]:
        """Returns the bytes of this rank's buffers at rest by kind; `master` is zero where the parameters serve as master
        weights."""
        found = dict.fromkeys(KINDS, 0)
        for buffer in self.buffers:
            if buffer.residency == residency and buffer.lifetime == "always":
                found[buffer.reported] += buffer.bytes(self.elements(buffer))
        return found


class StateSpec(NamedTuple):
    """The facts beyond the section `state` that decide which buffers chunks have: compute type, and update rules by
    parameter."""

    compute: torch.dtype
    rules: Mapping[str, Rule]
    # For parameters that are, or will be, pruned: the unpruned fraction of this rank's slice; None: not pruned yet.
    unpruned: Mapping[str, float | None] = {}
    mask_form: MaskForm = "int32"

    def unpruned_of(self, slot: ParameterSlot) -> int:
        """Returns the number of unpruned elements in this rank's slice of a parameter."""
        share, elements = self.unpruned.get(slot.name), slot.shape.numel()
        return elements if share is None else round(share * elements)


def unpruned_shares(
    masks: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh, rank: int
) -> dict[str, float]:
    """Returns, by name, the fraction of the slice of `rank` that a parameter's mask (packed bits) leaves unpruned."""
    sizes = {name: _shape(layouts[name].region(mesh, rank)).numel() for name in masks}
    return {name: bits_of(bits) / max(1, sizes[name]) for name, bits in masks.items()}


def divide_chunks(
    layouts: Mapping[str, Layout], mesh: Mesh, rank: int, options: StateConfig, recipe: StateSpec
) -> list[ChunkPlan]:
    """Returns the chunks of `rank`, planned as if nothing were pruned and everything were on the device.

    Parameters with the same replicas and rule lie end to end, in order, in chunks within the size limit.

    Raises `UserError` when a parameter or its replicas cannot be divided as configured.
    """
    replicas = {axes: tuple(mesh.group(rank, axes)) for axes in {layout.partial_axes for layout in layouts.values()}}
    plans = list[ChunkPlan]()
    for row in end_to_end(layouts, mesh, rank, replicas, options.chunk, recipe):
        ranks, sharding = replicas[row.axes], sharding_of(row.rule, options)
        own = next(part for part in shard_groups(mesh, ranks, sharding) if rank in part)
        steps, depths = sharing_steps(shard_widths(sharding.shard, sharding.shard_ranks), len(own))
        shard_steps, place = [], own.index(rank)
        for step in steps:
            shard_steps.append(ShardStep(step, place % step))
            place //= step
        copies = mesh.axis_size(*row.same) * len(ranks) // len(own)
        kept = chunk_buffers(depths, row.rule, options, recipe)
        plans += row.sharded(row.borders(math.prod(steps)), tuple(shard_steps), depths, copies, kept)
    return in_order(plans, layouts)


def in_order(plans: Iterable[ChunkPlan], names: Iterable[str]) -> list[ChunkPlan]:
    """Sorts the chunks by the order of `names`, the parameters of the model."""
    first = {name: i for i, name in enumerate(names)}
    return sorted(plans, key=lambda plan: first[plan.slots[0].name])


class ChunkRow(NamedTuple):
    """Parameters with the same replicas and rule, end to end in chunks that are not sharded yet."""

    axes: tuple[str, ...]  # mesh axes of the replicas, whose gradients are partial sums
    same: tuple[str, ...]  # further mesh axes along which ranks hold identical parameters
    rule: Rule
    chunks: Sequence[tuple[ParameterSlot, ...]]
    align: int

    def borders(self, parts: int) -> list[Sequence[int]]:
        """Returns, for each chunk, the positions where its `parts` shards begin, and the position where the last one
        ends."""
        tiling, loads = TILINGS[self.rule.tiling], [0] * parts  # work of each part so far
        return [
            tiling.borders(
                [each for slot in slots for each in tiling.matrices(slot.start, slot.shape, slot.layout.shape)],
                aligned(slots[-1].limit, self.align),
                loads,
                self.align,
            )
            for slots in self.chunks
        ]

    def sharded(
        self,
        borders: Iterable[Sequence[int]],
        steps: tuple[ShardStep, ...],
        depths: ShardDepths,
        copies: int,
        kept: tuple[Buffer, ...],
    ) -> list[ChunkPlan]:
        """Returns the chunks of this row, sharded in `steps`; `copies` ranks keep one shard, in the buffers `kept`."""
        return [
            ChunkPlan(slots, self.axes, self.rule, ends, steps, copies, depths, kept)
            for slots, ends in zip(self.chunks, borders)
        ]


def end_to_end(
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    rank: int,
    replicas: Mapping[tuple[str, ...], Hashable],
    chunk: int | None,
    recipe: StateSpec,
) -> list[ChunkRow]:
    """Groups the parameters of `rank` by replicas, rule and whether they are ever pruned, and lays each group out in chunks.

    A chunk has at most `chunk` elements; the limit is searched for where `chunk` is None. `replicas` are the ranks along
    axes: two sets of axes may have the same ranks. The number of those ranks does not influence the result.
    """
    unlike = set(layouts.values())
    regions = {layout: layout.region(mesh, rank) for layout in unlike}
    room = {layout: math.prod(layout.local_shape(mesh)) for layout in unlike}
    groups: dict[tuple[Hashable, tuple[str, ...], Rule, bool], list[str]] = {}
    for name, layout in layouts.items():
        same = tuple(axis for axis in layout.replicated_axes if mesh.axis_size(axis) > 1)
        rule = recipe.rules[name]
        prunable = rule.trains and name in recipe.unpruned
        groups.setdefault((replicas[layout.partial_axes], same, rule, prunable), []).append(name)
    limit = chunk_limit([[room[layouts[name]] for name in names] for names in groups.values()], chunk)
    rows = list[ChunkRow]()
    for (_, same, rule, _), names in groups.items():
        align = max(each.align for each in buffers(ShardDepths(0, 0, 0), recipe.compute, recipe.compute, rule))
        own = [layouts[name] for name in names]
        chunks = [
            tuple(ParameterSlot(names[i], own[i], regions[own[i]], start, end) for i, start, end in placed)
            for placed in lay_out([room[layout] for layout in own], limit, align)
        ]
        rows.append(ChunkRow(layouts[names[0]].partial_axes, same, rule, chunks, align))
    return rows


def place_chunks(plans: Sequence[ChunkPlan], options: StateConfig, recipe: StateSpec) -> list[ChunkPlan]:
    """Returns the divided chunks with the buffers that their residency and pruning ask for.

    The first chunks, the fraction `resident_fraction`, stay on the device. All chunks behind are offloaded as configured.
    The first chunks are used first, while the updates of the others still run. Pruned chunks keep only their unpruned
    elements.
    """
    if options.offload == "none" and not recipe.unpruned:
        return [*plans]
    # With `auto`, the chunks that fit are added to the device later.
    fraction = 0.0 if options.resident_fraction == "auto" else options.resident_fraction
    here = fraction * sum(plan.size for plan in plans)
    found, size = list[ChunkPlan](), 0
    for plan in plans:
        size += plan.size
        first = plan.slots[0]
        elsewhere = size > here * (1 + 1e-9)
        where = options.offload if elsewhere else "none"
        # The embedding group sums the gradients of a tied embedding at the end of a step, on the device.
        sends = elsewhere and options.accumulate_on == "host" and "embedding" not in first.layout.replicated_axes
        depths = placed(plan.depths, where, sends)
        # Only masks that exist compress a chunk; parameters that are not pruned yet have all their elements.
        pruned = plan.rule.trains and any(recipe.unpruned.get(slot.name) is not None for slot in plan.slots)
        prunable = elsewhere and first.name in recipe.unpruned
        kept = chunk_buffers(depths, plan.rule, options, recipe, pruned, where, prunable, sends)
        if (kept, depths) != (plan.buffers, plan.depths):
            plan = replace(plan, buffers=kept, depths=depths)
        found.append(_compressed(plan, recipe) if pruned else plan)
    return found


def chunk_buffers(
    depths: ShardDepths,
    rule: Rule,
    options: StateConfig,
    recipe: StateSpec,
    pruned: bool = False,
    offload: str = "none",
    prunable: bool = False,
    sends: bool = False,
) -> tuple[Buffer, ...]:
    """Returns the buffers of a chunk for these depths and residencies; see `buffers.buffers`."""
    whole = lifetime(options)
    return buffers(
        depths,
        recipe.compute,
        getattr(torch, options.gradient_dtype),
        rule,
        lifetime=whole,
        offload=offload,
        pruned=pruned,
        prunable=prunable,
        sends=sends,
    )


def _compressed(plan: ChunkPlan, recipe: StateSpec) -> ChunkPlan:
    """Returns the plan with shards of equal length over its unpruned elements."""
    unpruned = sum(recipe.unpruned_of(slot) for slot in plan.slots)
    borders = plan.tiling.borders([], aligned(unpruned, plan.align), [0] * plan.shard_count, plan.align)
    return replace(plan, borders=borders, mask=MaskPlan(plan.size, unpruned, recipe.mask_form))


def placed(depths: ShardDepths, offload: str, sends: bool = False) -> ShardDepths:
    """Returns the depths of a chunk after offloading.

    On the host, parameters are sharded as finely as this rank updates them. Gradients that each microbatch `sends` to the
    host are whole until they are sent.
    """
    depths = depths._replace(parameters=depths.optimizer) if RESIDENCES[offload][0] != "device" else depths
    return depths._replace(gradients=0) if sends else depths


def lifetime(options: StateConfig) -> Lifetime:
    """Returns the lifetime of whole parameters that are gathered or fetched on use."""
    if options.cache is not None or RESIDENCES[options.offload][0] != "device":
        return "cache"
    return "use" if options.reshard_after_forward else "step"


def divide_stages(
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    rank: int,
    options: StateConfig,
    stage_of: Callable[[str], int],
    recipe: StateSpec,
) -> dict[int, list[ChunkPlan]]:
    """Returns the divided chunks of each pipeline stage on `rank`. `stage_of` maps a parameter's name to its stage; no chunk
    belongs to two stages.

    Raises `UserError` as `divide_chunks` does.
    """
    stages: dict[int, dict[str, Layout]] = {}
    for name, layout in layouts.items():
        stages.setdefault(stage_of(name), {})[name] = layout
    return {stage: divide_chunks(those, mesh, rank, options, recipe) for stage, those in sorted(stages.items())}


def lay_out(sizes: Sequence[int], limit: int, align: int = ALIGN) -> list[list[tuple[int, int, int]]]:
    """Returns (number, start, end) of each parameter of the given sizes, by chunk of at most `limit` elements. Each
    parameter begins at a multiple of `align`.

    A parameter larger than `limit` has a chunk of its own. Chunks are filled from the last parameter backwards, so that the
    first chunk is the small one. Its gradients arrive last, and no computation is left to overlap with their reduction.
    """
    chunks: list[list[int]] = []
    length = 0  # of the current chunk
    for number in reversed(range(len(sizes))):
        length += aligned(sizes[number], align)
        if not chunks or length - aligned(sizes[chunks[0][-1]], align) + sizes[chunks[0][-1]] > limit:
            chunks.insert(0, [])
            length = aligned(sizes[number], align)
        chunks[0].insert(0, number)
    return [_end_to_end(chunk, sizes, align) for chunk in chunks]


def _end_to_end(numbers: Sequence[int], sizes: Sequence[int], align: int) -> list[tuple[int, int, int]]:
    placed, start = [], 0
    for number in numbers:
        placed.append((number, start, start + sizes[number]))
        start += aligned(sizes[number], align)
    return placed


def chunk_limit(groups: Sequence[Sequence[int]], chosen: int | None) -> int:
    """Returns the largest number of elements in a chunk: `chosen`, or the result of `search_limit` over `groups`."""
    return chosen or _found_limit(tuple(map(tuple, groups)))


@lru_cache(maxsize=1024)
def _found_limit(groups: tuple[tuple[int, ...], ...]) -> int:
    """Searches for the limit once for equal sizes: many stages, and many plans, hold parameters of the same sizes."""
    return search_limit(groups, _SMALLEST, largest_chunk(sum(map(sum, groups))))


def largest_chunk(elements: int) -> int:
    """Returns the chunk size, in elements, at which the search begins for a model of `elements`."""
    return max(_SMALLEST, min(_LARGEST, elements // _CHUNKS))


def search_limit(groups: Sequence[Sequence[int]], smallest: int, largest: int) -> int:
    """Returns the one chunk size between the two limits that wastes least (Elixir, section 4: the search over all sizes).

    `groups` are the sizes of the parameters of each group. The empty space of chunks would be wasted in blocks of that one
    size. A group that fits into the smallest chunk is one small chunk and does not count, nor does a parameter larger than a
    chunk. Among equals, the largest size wins.
    """
    counted = [sizes for sizes in groups if lay_out(sizes, sum(map(aligned, sizes)))[0][-1][2] > smallest]

    limits_L = np.arange(largest, smallest - 1, -max(ALIGN, (largest - smallest) // _SIZES))
    return int(limits_L[sum((wasted(sizes, limits_L) for sizes in counted), np.zeros_like(limits_L)).argmin()])


def wasted(sizes: Sequence[int], limits_L: Sizes) -> Sizes:
    """Returns, for each limit, the elements that parameters of these sizes leave empty in chunks of at most that size.

    The function computes `lay_out` for all limits at once.
    """
    # As if the current chunk were full.
    waste_L, length_L, padding_L = np.zeros_like(limits_L), limits_L.copy(), np.zeros_like(limits_L)
    for size in reversed(sizes):
        room = aligned(size)
        begins_L = length_L + room - padding_L > limits_L
        waste_L += begins_L * np.maximum(0, limits_L - (length_L - padding_L))
        length_L = np.where(begins_L, room, length_L + room)
        padding_L = np.where(begins_L, room - size, padding_L)
    return waste_L + np.maximum(0, limits_L - (length_L - padding_L))


def sharding_of(rule: Rule, options: StateConfig) -> StateConfig:
    """Returns the sharding options for chunks of `rule`.

    Frozen chunks are sharded only as far as their parameters are, because they have no other state.
    """
    if rule.trains:
        return options
    width, *_ = shard_widths(options.shard, options.shard_ranks)
    shard = "none" if width == 1 else "parameters"
    return options.model_copy(update={"shard": shard, "shard_ranks": width})


def shard_groups(mesh: Mesh, replicas: Sequence[int], options: StateConfig) -> list[list[int]]:
    """Divides ranks that hold the same parameters into the groups that share their state out among them.

    The setting `shard_over: replicas` takes all of them (EPSO: the Optimus paper, section 3.2), and `data` the ranks along
    the data axis of the experts. `shard_ranks` makes groups of that many neighbours (HSDP). Raises `UserError` when
    `shard_ranks` does not divide the replicas.
    """
    if options.shard == "none":
        return [[rank] for rank in replicas]
    parts = [list(replicas)]
    if options.shard_over == "data":
        same_experts: dict[tuple[int, int], list[int]] = {}
        for rank in replicas:
            key = mesh.coordinate(rank, "ep"), mesh.coordinate(rank, "etp")
            same_experts.setdefault(key, []).append(rank)
        parts = list(same_experts.values())
    wanted, there = shard_widths(options.shard, options.shard_ranks)[-1], len(parts[0])
    if wanted is None or wanted >= there:
        return parts
    if there % wanted:
        near = [n for n in range(1, there + 1) if there % n == 0]
        raise UserError(
            f"state.shard_ranks {wanted} does not divide the {there} replicas of a parameter; "
            f"divisors: {', '.join(map(str, near))}"
        )
    return [part[i : i + wanted] for part in parts for i in range(0, there, wanted)]


def check_shard_ranks(layouts: Mapping[str, Layout], mesh: Mesh, options: StateConfig) -> None:
    """Raises `UserError` when `shard_ranks` exceeds the number of ranks that shard any parameter of the whole model.

    `layouts` are those of the whole model. Parameters that tensor parallelism replicates, such as norms, do not count: they
    are few. Experts may have fewer or more replicas than other parameters. Then the larger number is the limit, and
    parameters with fewer replicas are sharded over all of their replicas.
    """
    wanted = max(width or 0 for width in shard_widths(options.shard, options.shard_ranks))
    over_all = options.model_copy(update={"shard_ranks": None})
    axes = {layout.partial_axes for layout in layouts.values() if layout.partial_axes in (("dp", "cp"), ("edp",))}
    most = max(len(shard_groups(mesh, mesh.group(0, each), over_all)[0]) for each in axes)
    if wanted > most:
        cure = f"at most {most}, or leave it out for all" if most > 1 else "1, or leave it out"
        raise UserError(
            f"state.shard_ranks {wanted}: a parameter has at most {most} replicas on these {mesh.size} ranks; "
            f"set it to {cure}"
        )


def divisions(mesh: Mesh, replicas: Sequence[str], options: StateConfig) -> list[RankPartition]:
    """Returns one partition of all ranks per sharding step, and last the partition into ranks that hold the same shard."""
    all_replicas = mesh.groups(replicas)
    first = all_replicas.group(0)
    # All replica groups have the same structure, so the division of the first one applies to each.
    places_PW = np.searchsorted(first, shard_groups(mesh, first, options))
    shards = all_replicas.cut(lambda ranks_GR: ranks_GR[:, places_PW].reshape(-1, places_PW.shape[1]))
    steps, _ = sharing_steps(shard_widths(options.shard, options.shard_ranks), shards.largest)

    def shared(step: int, inner: int) -> RankPartition:
        return shards.cut(lambda ranks_GW: ranks_GW.reshape(-1, step, inner).swapaxes(1, 2).reshape(-1, step))

    inner = accumulate(steps, operator.mul, initial=1)
    copies_WP = np.sort(places_PW.T)  # the ranks of a group ascend
    copies = all_replicas.cut(lambda ranks_GR: ranks_GR[:, copies_WP].reshape(-1, copies_WP.shape[1]))
    return [*map(shared, steps, inner), copies]


def bytes_by_kind(plans: Sequence[ChunkPlan], residency: Residency = "device") -> dict[str, int]:
    """Returns the bytes at rest of all chunks of a rank, by kind."""
    counts = [plan.bytes_by_kind(residency) for plan in plans]
    return {kind: sum(count[kind] for count in counts) for kind in KINDS}


def sharing_steps(widths: Sequence[int | None], ranks: int) -> tuple[list[int], ShardDepths]:
    """Returns the steps in which `ranks` shard a chunk, and for each kind the number of steps after which it is kept.

    `widths` come from `shard_widths`. Raises `UserError` where they do not divide the ranks.
    """
    steps, depths, inner = list[int](), list[int](), 1
    for kind, width in zip(ShardDepths._fields, (min(width or ranks, ranks) for width in widths)):
        if ranks % width or width % inner:
            raise UserError(
                f"state.shard_ranks: {kind} over {width} ranks cannot be sharded further over the {ranks} replicas of a "
                f"parameter: choose a divisor of {ranks} that is a multiple of {inner}"
            )
        if width > inner:
            steps.append(width // inner)
            inner = width
        depths.append(len(steps))
    return steps, ShardDepths(*depths)
