"""How parameters are divided into chunks and chunks over ranks: pure arithmetic, for any rank of any mesh.

`ModelState` allocates what is planned here; checks and the planner ask the same plan for bytes without allocating anything.
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
from optimus.state.buffers import ALIGN, KINDS, RESIDENCES, Buffer, Depths, Lifetime, Residency, aligned, buffers
from optimus.state.masks import MaskForm, MaskPlan, bits_of
from optimus.state.tiling import TILINGS, Tiling

Sizes = npt.NDArray[np.int64]
Shard = Literal["none", "optimizer", "gradients", "parameters"]

_SMALLEST, _LARGEST = 1 << 22, 1 << 26  # chunk sizes searched: long enough for a network, small beside a device
_SIZES = 240  # of them that are tried
_CHUNKS = 8  # of a model at least, unless they would be too small: one is computed with while others are on their way


@dataclass(frozen=True)
class Slot:
    """Where this rank's part of one parameter lies in its chunk: elements `start` to `end`.

    There is room up to `limit`, for the largest part that a rank has: so a chunk lies alike on all ranks.
    """

    name: str
    layout: Layout
    region: tuple[slice, ...]  # of the global tensor
    start: int
    limit: int

    @property
    def end(self) -> int:
        """Where this rank's part ends."""
        return self.start + self.shape.numel()

    @property
    def shape(self) -> torch.Size:
        """Shape of this rank's part."""
        return _shape(self.region)

    def global_positions(self, local: Tensor) -> Tensor:
        """ChunkRow-major positions in the global tensor of row-major positions `local` (int64) in this rank's part."""
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
    """One of the steps in which a chunk is sharded: over so many ranks, of which this one gets the part `group_rank`."""

    ranks: int
    group_rank: int


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk: parameters of the same replicas and rule, sharded in steps; `replica_count` ranks keep one part of it.

    Extents, lengths and borders are of its compressed elements where it is pruned: then it has a `mask`.
    """

    slots: tuple[Slot, ...]
    partial_axes: tuple[str, ...]
    rule: Rule
    borders: Sequence[int]  # where its shards begin, after the last step, and where the last ends
    shard_steps: tuple[ShardStep, ...]
    replica_count: int
    depths: Depths
    buffers: tuple[Buffer, ...]  # as `buffers.py` has them for these depths
    mask: MaskPlan | None = None

    @property
    def size(self) -> int:
        """Elements of the whole chunk, the padding of the last part included."""
        return self.borders[-1] if self.mask is None else self.mask.size

    @property
    def shard_count(self) -> int:
        """Shards of the chunk after the last step."""
        return len(self.borders) - 1

    @property
    def length(self) -> int:
        """Elements of such a shard; in the mean, where shards differ."""
        return self.borders[-1] // self.shard_count

    def extent(self, depth: int) -> slice:
        """What this rank has of the chunk after `depth` steps."""
        first, number = self.shards(depth)
        return slice(self.borders[first], self.borders[first + number])

    def lengths(self, depth: int) -> list[int]:
        """Elements that the ranks of step `depth` have after it, of what they have before."""
        first, number = self.shards(depth)
        ends = self.borders[first : first + number + 1 : number // self.shard_steps[depth].ranks]
        return [end - start for start, end in pairwise(ends)]

    def shards(self, depth: int) -> tuple[int, int]:
        """The first shard of the extent of `depth`, and how many it is."""
        first, number = 0, self.shard_count
        for share in self.shard_steps[:depth]:
            number //= share.ranks
            first += share.group_rank * number
        return first, number

    def within(self, depth: int, part: int) -> slice:
        """The extent of depth `part` as part of that of `depth`."""
        outer, inner = self.extent(depth), self.extent(part)
        return slice(inner.start - outer.start, inner.stop - outer.start)

    def elements(self, buffer: Buffer) -> int:
        """Of a buffer of this chunk."""
        if self.mask is not None and buffer.extent != "compressed":
            return self.mask.size if buffer.extent == "whole" else self.mask.elements
        if buffer.depth == 0:
            return self.borders[-1]
        extent = self.extent(buffer.depth)
        return extent.stop - extent.start

    @property
    def tiling(self) -> Tiling:
        """How it is divided, as its rule says."""
        return TILINGS[self.rule.tiling]

    @property
    def align(self) -> int:
        """As the most demanding of its buffers."""
        return max(buffer.align for buffer in self.buffers)

    @property
    def lifetime(self) -> Lifetime:
        """When the whole parameters have memory."""
        return self.buffers[0].lifetime

    @property
    def keeps_whole(self) -> bool:
        """Whether the device keeps the whole parameters."""
        return self.stays("parameters")

    def residency(self, kind: str) -> Residency:
        """Where a buffer is; the device, if there is none of this kind."""
        return next((buffer.residency for buffer in self.buffers if buffer.kind == kind), "device")

    def stays(self, kind: str) -> bool:
        """Whether the device always has a buffer of this kind."""
        return any(buffer.kind == kind and buffer.lifetime == "always" for buffer in self.buffers)

    @property
    def has_master(self) -> bool:
        """Whether the master weights are apart from what is computed with."""
        return any(buffer.kind == "master" for buffer in self.buffers)

    @property
    def model_dtype(self) -> torch.dtype:
        """The type of the weights in a full checkpoint."""
        return torch.float32 if self.rule.trains else self.buffers[0].dtype

    @property
    def adds_gradients(self) -> bool:
        """Whether the gradients of each microbatch are added to a buffer that keeps less of them."""
        return any(buffer.kind == "gradients.shard" for buffer in self.buffers)

    @property
    def sends_gradients(self) -> bool:
        """Whether the gradients of each microbatch are added to those on the host."""
        used = any(buffer.kind == "gradients" and buffer.lifetime == "use" for buffer in self.buffers)
        return used and not self.adds_gradients

    @property
    def offloaded(self) -> bool:
        """Whether the device has not all of it at rest."""
        return any(buffer.residency != "device" for buffer in self.buffers)

    @property
    def shard(self) -> slice:
        """What this rank's optimizer updates of the chunk."""
        return self.extent(self.depths.optimizer)

    @property
    def updated(self) -> int:
        """Elements of it."""
        return self.shard.stop - self.shard.start

    @property
    def block(self) -> int:
        """Bytes of the whole parameters."""
        return self.buffers[0].bytes(self.size)

    def bytes_by_kind(self, residency: Residency = "device") -> dict[str, int]:
        """Bytes of this rank's buffers at rest; `master` is zero where the parameters serve as master weights."""
        found = dict.fromkeys(KINDS, 0)
        for buffer in self.buffers:
            if buffer.residency == residency and buffer.lifetime == "always":
                found[buffer.reported] += buffer.bytes(self.elements(buffer))
        return found


class Recipe(NamedTuple):
    """What buffers chunks have, beyond the section `state`: the type of computation, and the update rules by parameter."""

    compute: torch.dtype
    rules: Mapping[str, Rule]
    # Of this rank's parts of parameters that are, or will be, pruned: the share that is unpruned; None: not pruned yet.
    unpruned: Mapping[str, float | None] = {}
    mask_form: MaskForm = "int32"

    def unpruned_of(self, slot: Slot) -> int:
        """Elements of this rank's part of a parameter that are unpruned."""
        share, elements = self.unpruned.get(slot.name), slot.shape.numel()
        return elements if share is None else round(share * elements)


def unpruned_shares(
    masks: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh, rank: int
) -> dict[str, float]:
    """By name, the share of the part of `rank` of a parameter that is unpruned by its mask, packed bits."""
    sizes = {name: _shape(layouts[name].region(mesh, rank)).numel() for name in masks}
    return {name: bits_of(bits) / max(1, sizes[name]) for name, bits in masks.items()}


def divide_chunks(
    layouts: Mapping[str, Layout], mesh: Mesh, rank: int, options: StateConfig, recipe: Recipe
) -> list[ChunkPlan]:
    """The chunks of `rank`: parameters of the same replicas and rule in order, end to end, in chunks within the limit; as if
    nothing were pruned and all on the device.

    Raises `UserError` when a parameter or its replicas cannot be divided as asked.
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
    """The chunks in the order in which the model has `names`, their parameters."""
    first = {name: i for i, name in enumerate(names)}
    return sorted(plans, key=lambda plan: first[plan.slots[0].name])


class ChunkRow(NamedTuple):
    """Parameters of the same replicas and rule, end to end in chunks that are not sharded yet."""

    axes: tuple[str, ...]  # along which the replicas lie
    same: tuple[str, ...]  # along which other ranks have the same besides
    rule: Rule
    chunks: Sequence[tuple[Slot, ...]]
    align: int

    def borders(self, parts: int) -> list[Sequence[int]]:
        """Of each chunk, where the shards of so many ranks begin, and where the last ends."""
        tiling, loads = TILINGS[self.rule.tiling], [0] * parts  # what each part has to compute
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
        depths: Depths,
        copies: int,
        kept: tuple[Buffer, ...],
    ) -> list[ChunkPlan]:
        """Its chunks, sharded in these steps; `copies` ranks keep one shard, in the buffers `kept`."""
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
    recipe: Recipe,
) -> list[ChunkRow]:
    """The parameters of `rank`, by who has the same, the rule and whether they are pruned at some time, in chunks of `chunk`
    elements at most, which is found where it is None. `replicas` are the ranks along axes: two sets of axes may be the same
    ranks. How many there are decides nothing."""
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
        align = max(each.align for each in buffers(Depths(0, 0, 0), recipe.compute, recipe.compute, rule))
        own = [layouts[name] for name in names]
        chunks = [
            tuple(Slot(names[i], own[i], regions[own[i]], start, end) for i, start, end in placed)
            for placed in lay_out([room[layout] for layout in own], limit, align)
        ]
        rows.append(ChunkRow(layouts[names[0]].partial_axes, same, rule, chunks, align))
    return rows


def place_chunks(plans: Sequence[ChunkPlan], options: StateConfig, recipe: Recipe) -> list[ChunkPlan]:
    """Divided chunks as they are held: of those that are pruned what is left; all behind the first, which are the fraction
    `resident_fraction`, offloaded as configured. The first are used first, when the updates of the others are
    still under way."""
    if options.offload == "none" and not recipe.unpruned:
        return [*plans]
    fraction = (
        0.0 if options.resident_fraction == "auto" else options.resident_fraction
    )  # auto adds what there is room for
    here = fraction * sum(plan.size for plan in plans)
    found, size = list[ChunkPlan](), 0
    for plan in plans:
        size += plan.size
        first = plan.slots[0]
        elsewhere = size > here * (1 + 1e-9)
        where = options.offload if elsewhere else "none"
        # The ranks of a tied embedding's two stages add up what they have at the end of a step: on the device.
        sends = elsewhere and options.accumulate_on == "host" and "embedding" not in first.layout.replicated_axes
        depths = placed(plan.depths, where, sends)
        # Of some it is known what is left; of parameters that are not pruned yet, everything is.
        pruned = plan.rule.trains and any(recipe.unpruned.get(slot.name) is not None for slot in plan.slots)
        prunable = elsewhere and first.name in recipe.unpruned
        kept = chunk_buffers(depths, plan.rule, options, recipe, pruned, where, prunable, sends)
        if (kept, depths) != (plan.buffers, plan.depths):
            plan = replace(plan, buffers=kept, depths=depths)
        found.append(_compressed(plan, recipe) if pruned else plan)
    return found


def chunk_buffers(
    depths: Depths,
    rule: Rule,
    options: StateConfig,
    recipe: Recipe,
    pruned: bool = False,
    offload: str = "none",
    prunable: bool = False,
    sends: bool = False,
) -> tuple[Buffer, ...]:
    """Those of a chunk that is held so (`buffers.buffers`)."""
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


def _compressed(plan: ChunkPlan, recipe: Recipe) -> ChunkPlan:
    """The plan with shards, equally long, of its unpruned elements."""
    unpruned = sum(recipe.unpruned_of(slot) for slot in plan.slots)
    borders = plan.tiling.borders([], aligned(unpruned, plan.align), [0] * plan.shard_count, plan.align)
    return replace(plan, borders=borders, mask=MaskPlan(plan.size, unpruned, recipe.mask_form))


def placed(depths: Depths, offload: str, sends: bool = False) -> Depths:
    """Of a chunk that is offloaded so: what the host keeps of the parameters is what this rank updates of them. Gradients
    that each microbatch `sends` to the host are whole until they go."""
    depths = depths._replace(parameters=depths.optimizer) if RESIDENCES[offload][0] != "device" else depths
    return depths._replace(gradients=0) if sends else depths


def lifetime(options: StateConfig) -> Lifetime:
    """Of whole parameters that are gathered or fetched on use."""
    if options.cache is not None or RESIDENCES[options.offload][0] != "device":
        return "cache"
    return "use" if options.reshard_after_forward else "step"


def divide_stages(
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    rank: int,
    options: StateConfig,
    stage_of: Callable[[str], int],
    recipe: Recipe,
) -> dict[int, list[ChunkPlan]]:
    """The divided chunks of each stage of a pipeline on `rank`, by `stage_of` a parameter's name: no chunk is of two stages.

    Raises `UserError` as `divide_chunks` does.
    """
    stages: dict[int, dict[str, Layout]] = {}
    for name, layout in layouts.items():
        stages.setdefault(stage_of(name), {})[name] = layout
    return {stage: divide_chunks(those, mesh, rank, options, recipe) for stage, those in sorted(stages.items())}


def lay_out(sizes: Sequence[int], limit: int, align: int = ALIGN) -> list[list[tuple[int, int, int]]]:
    """(number, start, end) of each parameter of the given sizes, by chunk of at most `limit` elements; each begins at a
    multiple of `align`.

    A parameter larger than `limit` has a chunk of its own. Chunks are filled from the last parameter on, so that it is the
    first one that is small: its gradients arrive last, and nothing is left to do while they are reduced.
    """
    chunks: list[list[int]] = []
    length = 0  # of the chunk begun last
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
    """Elements of a chunk at most, where it is not `chosen`; `groups` are as `search_limit` has them."""
    return chosen or _found_limit(tuple(map(tuple, groups)))


@lru_cache(maxsize=1024)
def _found_limit(groups: tuple[tuple[int, ...], ...]) -> int:
    """Searched for once: many stages, and many plans, hold parameters of the same sizes."""
    return search_limit(groups, _SMALLEST, largest_chunk(sum(map(sum, groups))))


def largest_chunk(elements: int) -> int:
    """The largest chunk, in elements, of a model with so many: what the search begins with."""
    return max(_SMALLEST, min(_LARGEST, elements // _CHUNKS))


def search_limit(groups: Sequence[Sequence[int]], smallest: int, largest: int) -> int:
    """The one chunk size, between the two, that wastes least (Elixir, section 4: the search over all sizes).

    `groups` are the sizes of the parameters of each group. What chunks leave empty would be wasted in blocks of the one
    size. A group that fits into the smallest chunk is one small chunk and does not count, nor does a parameter larger
    than a chunk. Of equals the largest size is taken.
    """
    counted = [sizes for sizes in groups if lay_out(sizes, sum(map(aligned, sizes)))[0][-1][2] > smallest]

    limits_L = np.arange(largest, smallest - 1, -max(ALIGN, (largest - smallest) // _SIZES))
    return int(limits_L[sum((wasted(sizes, limits_L) for sizes in counted), np.zeros_like(limits_L)).argmin()])


def wasted(sizes: Sequence[int], limits_L: Sizes) -> Sizes:
    """Elements that parameters of such sizes leave empty in chunks of at most so many elements, for each of the limits:
    `lay_out` for all of them at once."""
    waste_L, length_L, padding_L = np.zeros_like(limits_L), limits_L.copy(), np.zeros_like(limits_L)  # of a full chunk
    for size in reversed(sizes):
        room = aligned(size)
        begins_L = length_L + room - padding_L > limits_L
        waste_L += begins_L * np.maximum(0, limits_L - (length_L - padding_L))
        length_L = np.where(begins_L, room, length_L + room)
        padding_L = np.where(begins_L, room - size, padding_L)
    return waste_L + np.maximum(0, limits_L - (length_L - padding_L))


def sharding_of(rule: Rule, options: StateConfig) -> StateConfig:
    """How chunks of `rule` are sharded: frozen ones as their parameters are, as there is nothing else of them to shard."""
    if rule.trains:
        return options
    width, *_ = shard_widths(options.shard, options.shard_ranks)
    shard = "none" if width == 1 else "parameters"
    return options.model_copy(update={"shard": shard, "shard_ranks": width})


def shard_groups(mesh: Mesh, replicas: Sequence[int], options: StateConfig) -> list[list[int]]:
    """Divide ranks that hold the same parameters into the groups that share their state out among them.

    With `shard_over: replicas` all of them (EPSO: the Optimus paper, section 3.2); with `data` those along the data axis of
    the experts; with `shard_ranks` neighbours of that number only (HSDP). Raises `UserError` when that does not divide them.
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
    """Raise `UserError` when `shard_ranks` are more than the ranks that share out any parameter of these, the whole model's.

    Those that tensor parallelism repeats, as norms, do not count: they are few. Where experts have fewer replicas than the
    rest, or more, the larger number is the limit; the others are sharded over all that there are.
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
    """All ranks divided into groups, in one way for each step in which state is sharded, and into those that hold the
    same part of it, last."""
    all_replicas = mesh.groups(replicas)
    first = all_replicas.group(0)
    # What shares state out among the first replicas does so among others, which lie alike.
    places_PW = np.searchsorted(first, shard_groups(mesh, first, options))
    shards = all_replicas.cut(lambda ranks_GR: ranks_GR[:, places_PW].reshape(-1, places_PW.shape[1]))
    steps, _ = sharing_steps(shard_widths(options.shard, options.shard_ranks), shards.largest)

    def shared(step: int, inner: int) -> RankPartition:
        return shards.cut(lambda ranks_GW: ranks_GW.reshape(-1, step, inner).swapaxes(1, 2).reshape(-1, step))

    inner = accumulate(steps, operator.mul, initial=1)
    copies_WP = np.sort(places_PW.T)  # ranks of a group are in order
    copies = all_replicas.cut(lambda ranks_GR: ranks_GR[:, copies_WP].reshape(-1, copies_WP.shape[1]))
    return [*map(shared, steps, inner), copies]


def bytes_by_kind(plans: Sequence[ChunkPlan], residency: Residency = "device") -> dict[str, int]:
    """Bytes at rest of all chunks of a rank, by kind."""
    counts = [plan.bytes_by_kind(residency) for plan in plans]
    return {kind: sum(count[kind] for count in counts) for kind in KINDS}


def sharing_steps(widths: Sequence[int | None], ranks: int) -> tuple[list[int], Depths]:
    """In which steps `ranks` shard a chunk, and after how many of them each kind is kept, given `shard_widths`.

    Raises `UserError` where these do not divide the ranks.
    """
    steps, depths, inner = list[int](), list[int](), 1
    for kind, width in zip(Depths._fields, (min(width or ranks, ranks) for width in widths)):
        if ranks % width or width % inner:
            raise UserError(
                f"state.shard_ranks: {kind} over {width} ranks cannot be sharded further over the {ranks} replicas of a "
                f"parameter: choose a divisor of {ranks} that is a multiple of {inner}"
            )
        if width > inner:
            steps.append(width // inner)
            inner = width
        depths.append(len(steps))
    return steps, Depths(*depths)
