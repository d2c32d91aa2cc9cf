"""Computes the chunks of one representative rank per set of pipeline stages, and the ranks that shard each chunk.

The order of parameters in chunks does not depend on the number of replicas, so jobs that differ only in the number of
replicas share the order.
"""

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Literal, NamedTuple

import torch

from optimus.config import Architecture
from optimus.config.tree import StateConfig, shard_widths
from optimus.mesh import Layout, Mesh
from optimus.mesh.strided import StridedGroup, group_along
from optimus.optim.rule import Rule
from optimus.parallel.layouts import parameter_layouts
from optimus.plan.blocks import Factors, examples
from optimus.plan.job import Job, Rules
from optimus.resolve.parameters import layout_options
from optimus.resolve.precision import DTYPES
from optimus.resolve.rules import default_rule
from optimus.state.buffers import ShardDepths
from optimus.state.masks import MaskForm
from optimus.state.plan import (
    ChunkPlan,
    ChunkRow,
    ShardStep,
    StateSpec,
    chunk_buffers,
    end_to_end,
    in_order,
    place_chunks,
    shard_sizes,
    sharding_of,
    sharing_steps,
)
from optimus.state.tiling import TILINGS

_DEFAULT = ((default_rule(), 1.0, 1.0),)

# Position of a parameter in the model. An integer identifies a kind of block by the first layer of the kind; "first" is
# before the blocks, "last" after the blocks. Embedding and output layer share a "tied" table. All ranks of the pipeline
# divide an "every" parameter.
Where = int | Literal["first", "last", "tied", "every"]


# ---- Parameters of a model ----


class ParameterKind(NamedTuple):
    """Parameters with the same layout and the same position in a block or in the model. `between` is the range of the
    kind's blocks with the update rule `rule`, as fractions from 0 to 1. Pruning leaves the share `unpruned` of the
    elements of these parameters."""

    where: Where
    layout: Layout
    rule: Rule
    between: tuple[float, float]
    unpruned: float


class PartCounts(NamedTuple):
    """Counts of the model's parts on a stage or a rank."""

    layers: tuple[int, ...]  # one entry per block: the first layer of the block's kind
    first: int  # 1 if the stage or rank has the modules before the blocks, else 0
    last: int  # 1 if the stage or rank has the modules after the blocks, else 0
    tied: int  # 1 if the stage or rank has the table that embedding and output layer share, else 0
    every: int = 1  # 1 to count a slice of the parameters that all ranks of the pipeline divide, else 0

    @property
    def blocks(self) -> int:
        """Number of blocks of all kinds."""
        return len(self.layers)

    def count_at(self, where: Where) -> int:
        """Returns the number of blocks of one kind; for any other position, 1 or 0."""
        return int(getattr(self, where)) if isinstance(where, str) else self.layers.count(where)


class Kinds:
    """The kinds of a model's parameters. `_kinds` caches one object for jobs with equal models, rules, factors and
    layout options."""

    def __init__(self, rows: Iterable[ParameterKind]) -> None:
        self.rows = tuple(rows)
        self.axes = tuple(dict.fromkeys(kind.layout.partial_axes for kind in self.rows))

    def names(self, counts: PartCounts) -> Iterator[tuple[str, ParameterKind]]:
        """Yields the parameters of a rank with these parts of the model, in the model's order, each with a unique name."""
        parts = [(where, list(rows)) for where, rows in groupby(enumerate(self.rows), key=lambda row: row[1].where)]
        blocks = {where: rows for where, rows in parts if isinstance(where, int)}
        before = sum(1 for _ in takewhile(lambda part: part[0] not in blocks, parts))
        after = before + len(blocks)
        done = Counter[Where]()
        for where, rows in *parts[:before], *((layer, blocks[layer]) for layer in counts.layers), *parts[after:]:
            number = counts.count_at(where)
            for row, kind in rows if number else ():
                low, high = kind.between
                if round(low * number) <= done[where] < round(high * number):
                    yield f"{row}.{done[where]}", kind
            done[where] += isinstance(where, int)


def kinds_of(job: Job) -> Kinds:
    """Returns the kinds of parameters in the job's model, with the job's layouts and one block of each kind."""
    return _kinds(job.model, job.rules, job.factors, *layout_options(job.config).items())


@lru_cache(maxsize=256)
def _kinds(model: Architecture, rules: Rules, factors: Factors, *options: tuple[str, bool]) -> Kinds:
    (made, layers), chosen, names = examples(model, factors), dict(options), model.parts
    layouts, vocabulary = parameter_layouts(made, **chosen), chosen["vocabulary"]
    table: Where = "tied" if model.tie_embeddings else "first"

    def where(name: str) -> Where:
        if vocabulary and names.in_vocabulary(name):
            return "every"
        if (block := names.block_of(name)) is not None:
            return layers[block]
        if names.in_embedding(name):
            return table
        return "first" if names.is_before(name) else "last"

    def rows() -> Iterator[ParameterKind]:
        for (name, layout), those in zip(layouts.items(), rules or (_DEFAULT,) * len(layouts), strict=True):
            ends = accumulate((share for _, share, _ in those), initial=0.0)
            for (rule, _, unpruned), between in zip(those, pairwise(ends)):
                yield ParameterKind(where(name), layout, rule, between, unpruned)

    return Kinds(rows())


# ---- Parameters end to end ----


class MatrixGroup(NamedTuple):
    """Matrices of parameters with the same layout: `number` matrices in all, `together` matrices in each parameter. The
    ranks along `axes` divide every matrix into `blocks` blocks."""

    number: int
    together: int
    rows: int  # rows of a whole matrix
    columns: int
    axes: tuple[str, ...]
    blocks: int


class _PartChunks:
    """The parameters of a rank, end to end in chunks. The class caches the borders of shards by row and number of ranks."""

    def __init__(self, names: Sequence[str], spec: StateSpec, rows: Sequence[ChunkRow], mesh: Mesh) -> None:
        self.names, self.spec, self.rows, self._mesh = names, spec, rows, mesh
        self._borders: dict[tuple[int, int], Sequence[Sequence[int]]] = {}

    def unpruned(self, share: float | None) -> StateSpec:
        """Returns the specification after pruning has left this share of every prunable parameter; None: before pruning."""
        return self.spec._replace(unpruned=dict.fromkeys(self.spec.unpruned, share))

    def borders(self, row: int, parts: int) -> Sequence[Sequence[int]]:
        """Returns the borders of the shards of each chunk of a row, when `parts` ranks shard the row."""
        if (row, parts) not in self._borders:
            self._borders[row, parts] = self.rows[row].borders(parts)
        return self._borders[row, parts]

    @cached_property
    def matrices(self) -> Sequence[Sequence[MatrixGroup]]:
        """The groups of matrices in each row."""
        return [list(self._matrices(row)) for row in self.rows]

    def _matrices(self, row: ChunkRow) -> Iterator[MatrixGroup]:
        tiling, found = TILINGS[row.rule.tiling], defaultdict[tuple[Layout, int], int](int)
        for slot in (slot for slots in row.chunks for slot in slots):
            for each in tiling.matrices(slot.start, slot.shape, slot.layout.shape):
                found[slot.layout, each.number] += each.number
        for (layout, together), number in found.items():
            axes = tiling.split_axes(layout, self._mesh)
            rows, columns = layout.shape[-2:]
            yield MatrixGroup(number, together, rows, columns, axes, self._mesh.axis_size(*axes))


@lru_cache(maxsize=4096)
def _lay_out(
    kinds: Kinds,
    counts: PartCounts,
    mesh: Mesh,
    alike: tuple[int, ...],
    chunk: int | None,
    compute: torch.dtype,
    mask_form: MaskForm,
) -> _PartChunks:
    """Lays the parameters of a rank end to end in chunks. `alike` has a number for each entry of `kinds.axes`; entries that
    span the same ranks have equal numbers."""
    named = dict(kinds.names(counts))
    unpruned = {name: None for name, kind in named.items() if kind.unpruned < 1}
    spec = StateSpec(compute, {name: kind.rule for name, kind in named.items()}, unpruned, mask_form)
    layouts = {name: kind.layout for name, kind in named.items()}
    return _PartChunks(list(named), spec, end_to_end(layouts, mesh, 0, dict(zip(kinds.axes, alike)), chunk, spec), mesh)


@lru_cache(maxsize=1024)
def _alike(kinds: Kinds, mesh: Mesh) -> tuple[int, ...]:
    found: dict[StridedGroup, int] = {}
    return tuple(found.setdefault(_replicas(axes, mesh), len(found)) for axes in kinds.axes)


def _chunks_of_part(job: Job, counts: PartCounts) -> _PartChunks:
    kinds, least = kinds_of(job), _least(job.mesh, job.mesh.pp if job.parallel.vocabulary else 2)
    compute, pruning = DTYPES[job.train.precision], job.config.pruning
    form = pruning.indices if pruning is not None else "int32"
    return _lay_out(kinds, counts, least, _alike(kinds, job.mesh), job.state.chunk, compute, form)


@lru_cache(maxsize=1024)
def _least(mesh: Mesh, stages: int) -> Mesh:
    """Returns a mesh whose ranks have the same slices of parameters as the ranks of `mesh`, with at most `stages`
    stages and as few replicas as possible."""
    data = math.lcm(mesh.tp, mesh.ep * mesh.etp) // mesh.tp
    return Mesh(min(mesh.pp, stages), data, 1, mesh.tp, mesh.ep, mesh.etp, mesh.tp_in)


# ---- Sharded chunks ----


class ChunkGroup:
    """Chunks of a rank with the same replicas and the same update rule, and the placement of these replicas."""

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        matrices: Sequence[MatrixGroup],
        replicas: StridedGroup,
        steps: tuple[StridedGroup, ...],
        replica_group: StridedGroup,
    ) -> None:
        """Stores `plans`, which the ranks of `replicas` shard in `steps` (`state.plan.sharing_steps`). `replica_group` are
        the ranks that update the same elements. `matrices` is empty unless the rule updates whole matrices."""
        self.plans, self.matrices, self.replicas, self.steps = plans, matrices, replicas, steps
        self.replica_group = replica_group
        self.rule, self.depths = plans[0].rule, plans[0].depths

    @cached_property
    def elements(self) -> int:
        """Number of elements in the whole chunks. Whole chunks are dense: pruned elements are zeros."""
        return sum(plan.size for plan in self.plans)

    def after(self, depth: int) -> int:
        """Returns the number of unpruned elements in a rank's shard after `depth` sharding steps; where shards differ, in
        the largest shard."""
        sizes = shard_sizes(self.plans, depth)
        return sizes if isinstance(sizes, int) else int(sizes.max())

    def shards(self, depth: int) -> int:
        """Returns the number of shards after `depth` sharding steps."""
        return math.prod(step.size for step in self.steps[:depth])

    @cached_property
    def updated(self) -> int:
        """Number of elements that the rank with the largest shard updates."""
        return self.after(self.depths.optimizer)

    def moved(self, first: int, last: int) -> Iterator[tuple[int, StridedGroup]]:
        """Yields (number of elements, ranks that all-gather or reduce-scatter the elements) for each sharding step from
        `first` up to, but not including, `last`."""
        for depth in range(first, last):
            yield self.after(depth), self.steps[depth]


def held_in(job: Job, stages: Iterable[PartCounts]) -> Iterator[PartCounts]:
    """Yields the parts of the model on a rank with these stages, such that no chunk belongs to two parts.

    A table that embedding and output layer share is in one part only. With vocabulary parallelism, a rank's slice of
    the vocabulary is a separate part.
    """
    if job.parallel.vocabulary:
        yield PartCounts((), 0, 0, 0)
    tied = 0
    for each in stages:
        yield each._replace(tied=int(each.tied > tied), every=0)
        tied |= each.tied


def chunk_groups(job: Job, stages: Sequence[PartCounts]) -> list[ChunkGroup]:
    """Returns the chunks of a rank with these stages, grouped by replicas, update rule and masks, without offloading.
    In a run with pruning, the chunks have the sparsity after the last pruning."""
    state = job.state if job.state.offload == "none" else job.state.model_copy(update={"offload": "none"})
    unpruned = 1 - job.config.pruning.sparsity if job.config.pruning is not None else None
    found: dict[tuple[object, ...], ChunkGroup] = {}
    for counts in held_in(job, stages):
        part = _chunks_of_part(job, counts)
        for row, matrices, (plans, replicas, steps, copies) in zip(part.rows, part.matrices, _shared(job, part, state)):
            placed = place_chunks(plans, state, part.unpruned(unpruned))
            key = row.rule, placed[0].mask is None, replicas, steps
            before = found.get(key)
            found[key] = ChunkGroup(
                [*(before.plans if before else ()), *placed],
                [*(before.matrices if before else ()), *matrices],
                replicas,
                steps,
                copies,
            )
    return [*found.values()]


def chunk_plans(job: Job, counts: PartCounts, unpruned: float | None = None) -> list[ChunkPlan]:
    """Returns the chunks of the parameters in `counts`, an element of `held_in`, with the job's offloading. `unpruned`
    is the share of prunable elements that pruning leaves; None: before pruning."""
    part = _chunks_of_part(job, counts)
    plans = [plan for shared, *_ in _shared(job, part, job.state) for plan in shared]
    if job.state.offload != "none":  # a run may leave the state of the first chunks on the device
        plans = in_order(plans, part.names)
    return place_chunks(plans, job.state, part.unpruned(unpruned))


def _shared(
    job: Job, part: _PartChunks, options: StateConfig
) -> Iterator[tuple[list[ChunkPlan], StridedGroup, tuple[StridedGroup, ...], StridedGroup]]:
    """Yields (chunks, placement of their replicas, groups that shard the chunks in each step, ranks that update the same
    elements) for each row."""
    for number, row in enumerate(part.rows):
        sharding = sharding_of(row.rule, options)
        widths = shard_widths(sharding.shard, sharding.shard_ranks)
        replicas, steps, same, depths = _sharding(row.axes, job.mesh, options.shard_over == "data", widths)
        shards = math.prod(step.size for step in steps)
        copies = job.mesh.axis_size(*row.same) * replicas.size // shards
        planned = chunk_buffers(depths, row.rule, options, part.spec)
        shard_steps = tuple(ShardStep(step.size, 0) for step in steps)
        yield row.sharded(part.borders(number, shards), shard_steps, depths, copies, planned), replicas, steps, same


def _replicas(axes: tuple[str, ...], mesh: Mesh) -> StridedGroup:
    """Returns the placement of the ranks along `axes`."""
    several = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    return group_along(mesh, several) if several else StridedGroup(1)


@lru_cache(maxsize=8192)
def _sharding(
    axes: tuple[str, ...], mesh: Mesh, over_data: bool, widths: tuple[int | None, ...]
) -> tuple[StridedGroup, tuple[StridedGroup, ...], StridedGroup, ShardDepths]:
    """Returns the placement of the ranks along `axes`, the groups that shard the state in each step, the ranks that
    update the same elements, and the `ShardDepths`."""
    replicas = shared = _replicas(axes, mesh)
    several = 1  # distance, in replicas, between neighbours of a sharding group
    if over_data and axes != ("edp",):
        several = len({(mesh.coordinate(rank, "ep"), mesh.coordinate(rank, "etp")) for rank in mesh.group(0, axes)})
        shared = replicas.outer(several) if several < replicas.size else StridedGroup(1)
    if widths[-1] is not None:
        shared = shared.inner(min(widths[-1], shared.size))
    steps, depths = sharing_steps(widths, shared.size)
    before = accumulate(steps, initial=1, func=operator.mul)
    same = replicas.outer(math.prod(steps), several)
    return replicas, tuple(shared.outer(inner).inner(step) for inner, step in zip(before, steps)), same, depths


# ---- Totals ----


def max_load(matrices: Sequence[tuple[float, float]], ranks: int) -> float:
    """Estimates the largest cost on any of `ranks` ranks that divide whole matrices among themselves. `matrices` are
    pairs (number of matrices, cost of a matrix).

    The estimate is the largest number of matrices on a rank times the mean cost, and at least the highest cost of a
    matrix.
    """
    number, total = sum(n for n, _ in matrices), sum(n * size for n, size in matrices)
    if ranks == 1:
        return total
    return max(-(-round(number) // ranks) * total / number, *(size for _, size in matrices))


def written(held: Iterable[ChunkGroup], size: Callable[[Rule], float], *, scattered: bool) -> float:
    """Returns the mean bytes that a rank writes into a checkpoint, over the ranks that write. `size` returns the bytes
    per element of a rule. With `scattered`, replicas of a shard divide the writing among themselves."""
    found = defaultdict[float, float](float)
    for each in held:
        shards = each.replicas.size if scattered else each.shards(each.depths.optimizer)
        found[size(each.rule)] += each.elements / shards  # checkpoints store pruned chunks densely
    return sum(bytes_each * elements for bytes_each, elements in found.items())
