"""Divides parameters into chunks and shards the chunks over ranks, without any allocation."""

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
from optimus.mesh.mesh import divides_data
from optimus.optim.rule import Rule
from optimus.state.buffers import ALIGN, KINDS, RESIDENCES, Buffer, Lifetime, Residency, ShardDepths, aligned, buffers
from optimus.state.masks import MaskForm, MaskPlan, bits_of
from optimus.state.tiling import TILINGS, Tiling

Sizes = npt.NDArray[np.int64]
Shard = Literal["none", "optimizer", "gradients", "parameters"]

_SMALLEST, _LARGEST = 1 << 22, 1 << 26  # limits of the search for a chunk size, in elements
_SIZES = 240  # the search tries at most about this number of sizes
_CHUNKS = 8  # the largest size of the search is the rank's elements divided by this number, within the limits


@dataclass(frozen=True)
class ParameterSlot:
    """The elements of a chunk that hold this rank's slice of one parameter: elements `start` to `end`.

    The space up to `limit` fits the largest slice of any rank.
    """

    name: str
    layout: Layout
    region: tuple[slice, ...]  # this rank's slice of the global tensor
    start: int
    limit: int

    @property
    def end(self) -> int:
        """The position after the last element of this rank's slice."""
        return self.start + self.shape.numel()

    @property
    def shape(self) -> torch.Size:
        """The shape of this rank's slice."""
        return _shape(self.region)

    def global_positions(self, local: Tensor) -> Tensor:
        """Maps row-major positions `local` (int64) in this rank's slice to row-major positions in the global tensor."""
        if not self.layout.sharded_dims:
            return local
        positions, stride = torch.zeros_like(local), 1
        for part, global_size in zip(reversed(self.region), reversed(self.layout.shape)):
            size = part.stop - part.start
            positions += (local % size + part.start) * stride
            local, stride = local // size, stride * global_size
        return positions


def _shape(region: Sequence[slice]) -> torch.Size:
    return torch.Size(part.stop - part.start for part in region)


class ShardStep(NamedTuple):
    """A sharding step of a chunk over `ranks` ranks. This rank gets shard number `group_rank`."""

    ranks: int
    group_rank: int


@dataclass(frozen=True)
class ChunkPlan:
    """The plan of a chunk: parameters with the same replicas and rule, sharded in steps.

    The *extent* of depth d is the slice of the chunk that this rank has after d steps. `replica_count` ranks store the
    same shard. With a `mask`, extents, lengths and borders count compressed elements.
    """

    slots: tuple[ParameterSlot, ...]
    partial_axes: tuple[str, ...]
    rule: Rule
    borders: Sequence[int]  # starts of the shards after the last step, and the end of the last shard
    shard_steps: tuple[ShardStep, ...]
    replica_count: int
    depths: ShardDepths
    buffers: tuple[Buffer, ...]
    mask: MaskPlan | None = None
    small: bool = False  # True for a chunk that is neither sharded nor offloaded (`state.unsharded_below`)

    @property
    def size(self) -> int:
        """The number of elements of the whole dense chunk, including padding."""
        return self.borders[-1] if self.mask is None else self.mask.size

    @property
    def shard_count(self) -> int:
        """The number of shards of the chunk after the last step."""
        return len(self.borders) - 1

    @property
    def length(self) -> int:
        """The number of elements of a shard after the last step; the mean, rounded down, where shards differ in
        length."""
        return self.borders[-1] // self.shard_count

    def extent(self, depth: int) -> slice:
        """Returns the extent of `depth`, in elements of the chunk."""
        first, number = self.shards(depth)
        return slice(self.borders[first], self.borders[first + number])

    def lengths(self, depth: int) -> list[int]:
        """Returns the lengths of the shards into which step `depth` (counted from 0) divides the extent of `depth`."""
        first, number = self.shards(depth)
        ends = self.borders[first : first + number + 1 : number // self.shard_steps[depth].ranks]
        return [end - start for start, end in pairwise(ends)]

    def shards(self, depth: int) -> tuple[int, int]:
        """Returns (index of the first shard, number of shards) in the extent of `depth`.

        Counts the shards after the last step.
        """
        first, number = 0, self.shard_count
        for share in self.shard_steps[:depth]:
            number //= share.ranks
            first += share.group_rank * number
        return first, number

    def within(self, depth: int, part: int) -> slice:
        """Returns the extent of depth `part`, relative to the start of the extent of `depth`.

        `part` must not be less than `depth`.
        """
        outer, inner = self.extent(depth), self.extent(part)
        return slice(inner.start - outer.start, inner.stop - outer.start)

    def elements(self, buffer: Buffer) -> int:
        """Returns the number of elements of this chunk's `buffer` on this rank."""
        if self.mask is not None and buffer.extent != "compressed":
            return self.mask.size if buffer.extent == "dense" else self.mask.elements
        if buffer.depth == 0:
            return self.borders[-1]
        extent = self.extent(buffer.depth)
        return extent.stop - extent.start

    @property
    def tiling(self) -> Tiling:
        """The tiling that the chunk's rule names."""
        return TILINGS[self.rule.tiling]

    @property
    def align(self) -> int:
        """The largest alignment of the chunk's buffers, in elements."""
        return max(buffer.align for buffer in self.buffers)

    @property
    def lifetime(self) -> Lifetime:
        """The time during which the unsharded parameters have memory."""
        return self.buffers[0].lifetime

    @property
    def keeps_unsharded(self) -> bool:
        """True if the device always has memory for the unsharded parameters."""
        return self.stays("parameters")

    def residency(self, kind: str) -> Residency:
        """Returns the location of the buffer of this kind: device, host or disk; "device" if the chunk has none."""
        return next((buffer.residency for buffer in self.buffers if buffer.kind == kind), "device")

    def stays(self, kind: str) -> bool:
        """Returns True if the chunk has a buffer of this kind that always has memory."""
        return any(buffer.kind == kind and buffer.lifetime == "always" for buffer in self.buffers)

    @property
    def has_master(self) -> bool:
        """True if the master weights and the compute weights are separate buffers."""
        return any(buffer.kind == "master" for buffer in self.buffers)

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of the weights in a full checkpoint."""
        return torch.float32 if self.rule.trains else self.buffers[0].dtype

    @property
    def adds_gradients(self) -> bool:
        """True if each microbatch adds its gradients to a buffer of only a shard or only the unpruned elements."""
        return any(buffer.kind == "gradients.shard" for buffer in self.buffers)

    @property
    def sends_gradients(self) -> bool:
        """True if each microbatch adds its gradients to the gradients on the host."""
        used = any(buffer.kind == "gradients" and buffer.lifetime == "use" for buffer in self.buffers)
        return used and not self.adds_gradients

    @property
    def offloaded(self) -> bool:
        """True if some buffer of the chunk is on the host or on a disk."""
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
        """The bytes of the unsharded parameters."""
        return self.buffers[0].bytes(self.size)

    def bytes_by_kind(self, residency: Residency = "device") -> dict[str, int]:
        """Returns the bytes, by kind, of this rank's buffers that always have memory on `residency`."""
        found = dict.fromkeys(KINDS, 0)
        for buffer in self.buffers:
            if buffer.residency == residency and buffer.lifetime == "always":
                found[buffer.reported] += buffer.bytes(self.elements(buffer))
        return found


class ChunkSizes(NamedTuple):
    """The options for the sizes of chunks, in elements."""

    chunk: int | None = None
    """The maximum size of a chunk of several parameters; None: the result of a search."""
    between: tuple[int, int] | None = None
    """The smallest and the largest size of the search; None: by the number of parameters."""
    unsharded_below: int = 0
    """The parameters of a group with fewer elements are one chunk, which is neither sharded nor offloaded."""

    @classmethod
    def of_state(cls, options: StateConfig) -> "ChunkSizes":
        """Returns the options in the configuration section `state`."""
        between = None if options.chunk_sizes is None else (options.chunk_sizes[0], options.chunk_sizes[1])
        return cls(options.chunk, between, options.unsharded_below)


class StateSpec(NamedTuple):
    """The inputs that decide the buffers of chunks, in addition to the configuration section `state`."""

    compute: torch.dtype
    rules: Mapping[str, Rule]
    # By prunable parameter: the unpruned fraction of this rank's slice, or None before the first pruning.
    unpruned: Mapping[str, float | None] = {}
    mask_form: MaskForm = "int32"

    def unpruned_of(self, slot: ParameterSlot) -> int:
        """Returns the number of unpruned elements of `slot`."""
        share, elements = self.unpruned.get(slot.name), slot.shape.numel()
        return elements if share is None else round(share * elements)


def unpruned_shares(
    masks: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh, rank: int
) -> dict[str, float]:
    """Returns the unpruned fraction of each parameter's slice on `rank`, by name.

    `masks` has the masks of these slices as packed bits.
    """
    sizes = {name: _shape(layouts[name].region(mesh, rank)).numel() for name in masks}
    return {name: bits_of(bits) / max(1, sizes[name]) for name, bits in masks.items()}


def divide_chunks(
    layouts: Mapping[str, Layout], mesh: Mesh, rank: int, options: StateConfig, spec: StateSpec
) -> list[ChunkPlan]:
    """Returns the plans of the chunks of `rank` without pruning and offloading."""
    replicas = {axes: tuple(mesh.group(rank, axes)) for axes in {layout.partial_axes for layout in layouts.values()}}
    plans = list[ChunkPlan]()
    for row in end_to_end(layouts, mesh, rank, replicas, ChunkSizes.of_state(options), spec):
        ranks, sharding = replicas[row.axes], sharding_of(row.rule, options, small=row.small)
        own = next(part for part in shard_groups(mesh, ranks, sharding) if rank in part)
        steps, depths = sharing_steps(shard_widths(sharding.shard, sharding.shard_ranks), len(own))
        shard_steps, group_rank = [], own.index(rank)
        for step in steps:
            shard_steps.append(ShardStep(step, group_rank % step))
            group_rank //= step
        copies = mesh.axis_size(*row.same) * len(ranks) // len(own)
        planned = chunk_buffers(depths, row.rule, options, spec)
        plans += row.sharded(row.borders(math.prod(steps)), tuple(shard_steps), depths, copies, planned)
    return in_order(plans, layouts)


def in_order(plans: Iterable[ChunkPlan], names: Iterable[str]) -> list[ChunkPlan]:
    """Sorts the chunks by the position of their first parameter in `names`, the parameters of the model."""
    first = {name: i for i, name in enumerate(names)}
    return sorted(plans, key=lambda plan: first[plan.slots[0].name])


class ChunkRow(NamedTuple):
    """Chunks of parameters with the same replicas, rule and prunability, before sharding."""

    axes: tuple[str, ...]  # mesh axes of the replicas; gradients are partial sums along these axes
    same: tuple[str, ...]  # further mesh axes along which ranks hold identical parameters
    rule: Rule
    chunks: Sequence[tuple[ParameterSlot, ...]]
    align: int
    small: bool  # see `ChunkPlan.small`

    def borders(self, parts: int) -> list[Sequence[int]]:
        """Returns the borders of each chunk for `parts` shards; see `ChunkPlan.borders`."""
        tiling, loads = TILINGS[self.rule.tiling], [0] * parts
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
        planned: tuple[Buffer, ...],
    ) -> list[ChunkPlan]:
        """Returns the chunks of this row, sharded in `steps`. `copies` ranks store the same shard."""
        return [
            ChunkPlan(slots, self.axes, self.rule, ends, steps, copies, depths, planned, small=self.small)
            for slots, ends in zip(self.chunks, borders)
        ]


def end_to_end(
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    rank: int,
    replicas: Mapping[tuple[str, ...], Hashable],
    chunk_sizes: ChunkSizes,
    spec: StateSpec,
) -> list[ChunkRow]:
    """Groups the parameters of `rank` by replicas, replicated axes, rule and prunability, and lays out each group in
    chunks.

    `chunk_sizes` limits the sizes of chunks. A group with fewer than `unsharded_below` elements is one chunk, and does
    not count in the search for the limit.
    """
    unlike = set(layouts.values())
    regions = {layout: layout.region(mesh, rank) for layout in unlike}
    sizes = {layout: math.prod(layout.local_shape(mesh)) for layout in unlike}
    groups: dict[tuple[Hashable, tuple[str, ...], Rule, bool], list[str]] = {}
    for name, layout in layouts.items():
        same = tuple(axis for axis in layout.replicated_axes if mesh.axis_size(axis) > 1)
        rule = spec.rules[name]
        prunable = rule.trains and name in spec.unpruned
        groups.setdefault((replicas[layout.partial_axes], same, rule, prunable), []).append(name)
    lengths = {key: sum(aligned(sizes[layouts[name]]) for name in names) for key, names in groups.items()}
    small = {key for key, length in lengths.items() if length < chunk_sizes.unsharded_below}
    counted = ([sizes[layouts[name]] for name in names] for key, names in groups.items() if key not in small)
    found = chunk_limit([*counted], chunk_sizes)
    rows = list[ChunkRow]()
    for key, names in groups.items():
        _, same, rule, _ = key
        align = max(each.align for each in buffers(ShardDepths(0, 0, 0), spec.compute, spec.compute, rule))
        own = [layouts[name] for name in names]
        limit = sum(aligned(sizes[layout], align) for layout in own) if key in small else found
        chunks = [
            tuple(ParameterSlot(names[i], own[i], regions[own[i]], start, end) for i, start, end in placed)
            for placed in lay_out([sizes[layout] for layout in own], limit, align)
        ]
        rows.append(ChunkRow(layouts[names[0]].partial_axes, same, rule, chunks, align, key in small))
    return rows


def resident_chunks(plans: Sequence[ChunkPlan], options: StateConfig) -> int:
    """Returns the number of first chunks that together have at most the fraction `resident_fraction` of all elements.

    The fraction "auto" counts as 0.
    """
    fraction = 0.0 if options.resident_fraction == "auto" else options.resident_fraction
    here = fraction * sum(plan.size for plan in plans)
    return sum(size <= here * (1 + 1e-9) for size in accumulate(plan.size for plan in plans))


def place_chunks(plans: Sequence[ChunkPlan], options: StateConfig, spec: StateSpec) -> list[ChunkPlan]:
    """Returns the chunks of `divide_chunks` with the buffers that offloading and pruning need.

    The first chunks, up to the fraction `resident_fraction` of all elements, stay on the device, and so do small chunks.
    """
    if options.offload == "none" and not spec.unpruned:
        return [*plans]
    resident, found = resident_chunks(plans, options), list[ChunkPlan]()
    for number, plan in enumerate(plans):
        first = plan.slots[0]
        elsewhere = number >= resident and not plan.small
        where = options.offload if elsewhere else "none"
        # The embedding group sums the gradients of a tied embedding at the end of a step, on the device.
        sends = elsewhere and options.accumulate_on == "host" and "embedding" not in first.layout.replicated_axes
        depths = placed(plan.depths, where, sends)
        pruned = plan.rule.trains and any(spec.unpruned.get(slot.name) is not None for slot in plan.slots)
        prunable = elsewhere and first.name in spec.unpruned
        planned = chunk_buffers(depths, plan.rule, options, spec, pruned, where, prunable, sends)
        plan = replace(plan, buffers=planned, depths=depths)
        found.append(_compressed(plan, spec) if pruned else plan)
    return found


def chunk_buffers(
    depths: ShardDepths,
    rule: Rule,
    options: StateConfig,
    spec: StateSpec,
    pruned: bool = False,
    offload: str = "none",
    prunable: bool = False,
    sends: bool = False,
) -> tuple[Buffer, ...]:
    """Returns the buffers of a chunk for `depths` and `offload`; see `buffers.buffers`."""
    return buffers(
        depths,
        spec.compute,
        getattr(torch, options.gradient_dtype),
        rule,
        lifetime=lifetime(options),
        offload=offload,
        pruned=pruned,
        prunable=prunable,
        sends=sends,
    )


def _compressed(plan: ChunkPlan, spec: StateSpec) -> ChunkPlan:
    unpruned = sum(spec.unpruned_of(slot) for slot in plan.slots)
    borders = plan.tiling.borders([], aligned(unpruned, plan.align), [0] * plan.shard_count, plan.align)
    return replace(plan, borders=borders, mask=MaskPlan(plan.size, unpruned, spec.mask_form))


def placed(depths: ShardDepths, offload: str, sends: bool = False) -> ShardDepths:
    """Returns the sharding depths of a chunk under `offload`: parameters on the host are sharded like the optimizer
    state. With `sends`, gradients stay unsharded until their reduction."""
    depths = depths._replace(parameters=depths.optimizer) if RESIDENCES[offload][0] != "device" else depths
    return depths._replace(gradients=0) if sends else depths


def lifetime(options: StateConfig) -> Lifetime:
    """Returns the lifetime of unsharded parameters that a chunk all-gathers or fetches on use."""
    if options.cache is not None or RESIDENCES[options.offload][0] != "device":
        return "cache"
    return "use" if options.reshard_after_forward else "step"


def divide_stages(
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    rank: int,
    options: StateConfig,
    stage_of: Callable[[str], int],
    spec: StateSpec,
) -> dict[int, list[ChunkPlan]]:
    """Returns the divided chunks of each pipeline stage on `rank`; `stage_of` maps a parameter's name to its stage."""
    stages: dict[int, dict[str, Layout]] = {}
    for name, layout in layouts.items():
        stages.setdefault(stage_of(name), {})[name] = layout
    return {stage: divide_chunks(those, mesh, rank, options, spec) for stage, those in sorted(stages.items())}


def lay_out(sizes: Sequence[int], limit: int, align: int = ALIGN) -> list[list[tuple[int, int, int]]]:
    """Lays out parameters of the given `sizes` in chunks of at most `limit` elements; returns, for each chunk, (number,
    start, end) of each parameter.

    Each parameter begins at a multiple of `align`. A parameter larger than `limit` gets a separate chunk.
    """
    chunks: list[list[int]] = []
    length = 0
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


def chunk_limit(groups: Sequence[Sequence[int]], options: ChunkSizes) -> int:
    """Returns the maximum number of elements in a chunk: `options.chunk`, or the result of a search."""
    return options.chunk or _found_limit(tuple(map(tuple, groups)), options.between)


@lru_cache(maxsize=1024)
def _found_limit(groups: tuple[tuple[int, ...], ...], between: tuple[int, int] | None) -> int:
    if between is not None:
        return search_limit(groups, *between, every_size(groups, *between))
    return search_limit(groups, _SMALLEST, largest_chunk(sum(map(sum, groups))))


def largest_chunk(elements: int) -> int:
    """Returns the largest chunk size of the search, in elements, for a rank with `elements` elements."""
    return max(_SMALLEST, min(_LARGEST, elements // _CHUNKS))


def search_limit(groups: Sequence[Sequence[int]], smallest: int, largest: int, limits_L: Sizes | None = None) -> int:
    """Returns the chunk size that leaves the fewest elements empty (Elixir, section 4): the first of the best of
    `limits_L`, by default at most about `_SIZES` sizes from `largest` down to `smallest`.

    Groups that fit into the smallest chunk do not count.
    """
    counted = [sizes for sizes in groups if lay_out(sizes, sum(map(aligned, sizes)))[0][-1][2] > smallest]
    if limits_L is None:
        limits_L = np.arange(largest, smallest - 1, -max(ALIGN, (largest - smallest) // _SIZES))
    return int(limits_L[sum((wasted(sizes, limits_L) for sizes in counted), np.zeros_like(limits_L)).argmin()])


def every_size(groups: Sequence[Sequence[int]], smallest: int, largest: int) -> Sizes:
    """Returns the sizes from `largest` down to `smallest` among which the best of all these sizes is.

    A size between two of them cuts the groups into the same chunks as the next smaller one, and leaves more empty: the
    chunks change only at a size that fills a chunk of neighbouring parameters.
    """
    found = {smallest, largest}
    for sizes in groups:
        ends_P = np.cumsum([0, *map(aligned, sizes)])
        padding_P = np.array([aligned(size) - size for size in sizes])
        for first in range(len(sizes)):
            lengths = ends_P[first + 1 :] - ends_P[first] - padding_P[first:]
            found |= {*lengths[(smallest < lengths) & (lengths < largest)].tolist()}
    return np.array(sorted(found, reverse=True))


def wasted(sizes: Sequence[int], limits_L: Sizes) -> Sizes:
    """Returns, for each limit, the number of elements that `lay_out` leaves empty at the ends of chunks."""
    # The initial state is a full chunk.
    waste_L, length_L, padding_L = np.zeros_like(limits_L), limits_L.copy(), np.zeros_like(limits_L)
    for size in reversed(sizes):
        padded = aligned(size)
        begins_L = length_L + padded - padding_L > limits_L
        waste_L += begins_L * np.maximum(0, limits_L - (length_L - padding_L))
        length_L = np.where(begins_L, padded, length_L + padded)
        padding_L = np.where(begins_L, padded - size, padding_L)
    return waste_L + np.maximum(0, limits_L - (length_L - padding_L))


def sharding_of(rule: Rule, options: StateConfig, *, small: bool = False) -> StateConfig:
    """Returns the sharding options for chunks of `rule`; frozen chunks have only the sharding of parameters, and `small`
    chunks have none."""
    if small:
        return options.model_copy(update={"shard": "none", "shard_ranks": None})
    if rule.trains:
        return options
    width, *_ = shard_widths(options.shard, options.shard_ranks)
    shard = "none" if width == 1 else "parameters"
    return options.model_copy(update={"shard": shard, "shard_ranks": width})


def shard_groups(mesh: Mesh, replicas: Sequence[int], options: StateConfig) -> list[list[int]]:
    """Divides `replicas`, the ranks with the same parameters, into the groups that shard the state of these parameters.

    The setting `shard_over: replicas` makes one group of all replicas (EPSO: the Optimus paper, section 3.2). The
    setting `shard_over: data` makes groups along the data axis of the experts. The number for the optimizer state in
    `shard_ranks` divides each group into smaller groups of neighbouring ranks (HSDP). Raises `UserError` when the
    number is smaller than a group and does not divide the group's size. Without sharding, each rank is a group.
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
    """Raises `UserError` if `shard_ranks` exceeds the number of data-parallel replicas of every parameter."""
    wanted = max(width or 0 for width in shard_widths(options.shard, options.shard_ranks))
    over_all = options.model_copy(update={"shard_ranks": None})
    axes = {tuple(filter(divides_data, layout.partial_axes)) for layout in layouts.values()}
    most = max(len(shard_groups(mesh, mesh.group(0, each), over_all)[0]) for each in axes)
    if wanted > most:
        cure = f"at most {most}, or remove it for all replicas" if most > 1 else "1, or remove it"
        raise UserError(
            f"state.shard_ranks {wanted}: a parameter has at most {most} replicas on these {mesh.size} ranks; "
            f"set it to {cure}"
        )


def shard_partitions(mesh: Mesh, replicas: Sequence[str], options: StateConfig) -> list[RankPartition]:
    """Returns one partition of all ranks per sharding step, then the partition into replica groups.

    The ranks of a replica group store the same shard. `replicas` are the mesh axes along which parameters repeat.
    """
    all_replicas = mesh.groups(replicas)
    first = all_replicas.group(0)
    # All groups of `all_replicas` have the same structure, so the shard groups of the first group apply to each.
    positions_PW = np.searchsorted(first, shard_groups(mesh, first, options))
    shards = all_replicas.cut(lambda ranks_GR: ranks_GR[:, positions_PW].reshape(-1, positions_PW.shape[1]))
    steps, _ = sharing_steps(shard_widths(options.shard, options.shard_ranks), shards.largest)

    def shared(step: int, inner: int) -> RankPartition:
        return shards.cut(lambda ranks_GW: ranks_GW.reshape(-1, step, inner).swapaxes(1, 2).reshape(-1, step))

    inner = accumulate(steps, operator.mul, initial=1)
    copies_WP = np.sort(positions_PW.T)  # ascending ranks in each group
    copies = all_replicas.cut(lambda ranks_GR: ranks_GR[:, copies_WP].reshape(-1, copies_WP.shape[1]))
    return [*map(shared, steps, inner), copies]


def shard_sizes(plans: Sequence[ChunkPlan], depth: int) -> int | Sizes:
    """Returns the number of elements of each shard after `depth` steps, summed over `plans`; one number if the tiling
    makes equal shards. All `plans` must have the same tiling and sharding steps."""
    first = plans[0]
    _, together = first.shards(depth)
    if first.tiling.equal:
        return sum([plan.borders[-1] for plan in plans]) * together // first.shard_count
    return sum((np.diff(plan.borders[::together]) for plan in plans), np.zeros(first.shard_count // together, np.int64))


def bytes_by_kind(plans: Sequence[ChunkPlan], residency: Residency = "device") -> dict[str, int]:
    """Returns the bytes, by kind, of a rank's buffers that always have memory on `residency`, over all chunks."""
    counts = [plan.bytes_by_kind(residency) for plan in plans]
    return {kind: sum(count[kind] for count in counts) for kind in KINDS}


def sharing_steps(widths: Sequence[int | None], ranks: int) -> tuple[list[int], ShardDepths]:
    """Returns (ranks of each sharding step, depths) for a chunk that `ranks` ranks shard.

    `widths` is a result of `shard_widths`. Limits each width to `ranks`. Raises `UserError` if a width does not
    divide the ranks or the next width.
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
