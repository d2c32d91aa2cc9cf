"""Computes the chunks of one representative rank per set of pipeline stages, and the ranks that shard each chunk."""

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
from optimus.parallel.degrees import TensorDegrees, layer_kinds
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
    ChunkSizes,
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

# Position of a parameter in the model: the first layer of a kind of block, or a name. All ranks of the pipeline divide
# an "every" parameter.
Where = int | Literal["first", "last", "tied", "every"]


# ---- Parameters of a model ----


class ParameterKind(NamedTuple):
    """Parameters with the same position, layout and update rule.

    At a kind of block, `between` selects the blocks with this rule: a range of fractions of the blocks of this kind,
    from 0 to 1. `unpruned` is the fraction of elements that are left after the last pruning.
    """

    where: Where
    layout: Layout
    rule: Rule
    between: tuple[float, float]
    unpruned: float


class PartCounts(NamedTuple):
    """Counts of the model's parts on a stage or a rank."""

    layers: tuple[int, ...]  # one entry per block: the first layer of the block's kind
    first: int  # 1 with the modules before the blocks, else 0
    last: int  # 1 with the modules after the blocks, else 0
    tied: int  # 1 if tied embeddings would have their table here, else 0
    every: int = 1  # 1 if an "every" parameter would have a slice here, else 0
    start: int | None = None  # with `parallel.layers`: the number of the first block

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the blocks with `parallel.layers`, else the numbers of blocks alike."""
        return self.layers if self.start is None else range(self.start, self.start + self.blocks)

    @property
    def blocks(self) -> int:
        """Number of blocks of all kinds."""
        return len(self.layers)

    def count_at(self, where: Where) -> int:
        """Returns the number of blocks of one kind, or 1 or 0 for any other position."""
        return int(getattr(self, where)) if isinstance(where, str) else self.layers.count(where)


class Kinds:
    """Parameters by kind (`rows`), and the distinct mesh axes along which gradients are partial sums (`axes`)."""

    def __init__(self, rows: Iterable[ParameterKind]) -> None:
        self.rows = tuple(rows)
        self.axes = tuple(dict.fromkeys(kind.layout.partial_axes for kind in self.rows))

    def names(self, counts: PartCounts) -> Iterator[tuple[str, ParameterKind]]:
        """Yields (unique name, kind) for each parameter of a rank with these parts, in the order of the model."""
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
    """Returns the kinds of parameters in the job's model."""
    options = layout_options(job.config)
    return _kinds(job.model, job.rules, job.factors, options.pop("degrees"), *options.items())


@lru_cache(maxsize=256)
def _kinds(
    model: Architecture, rules: Rules, factors: Factors, degrees: TensorDegrees, *options: tuple[str, bool]
) -> Kinds:
    (made, layers), chosen, names = examples(model, factors), dict(options), model.parts
    vocabulary = chosen["vocabulary"]
    table: Where = "tied" if model.tie_embeddings else "first"

    def where(name: str) -> Where:
        if vocabulary and names.in_vocabulary(name):
            return "every"
        if (block := names.block_of(name)) is not None:
            return layers[block]
        if names.in_embedding(name):
            return table
        return "first" if names.is_before(name) else "last"

    kinds = sorted(set(layer_kinds(model, degrees)))
    every = range(len(made.blocks))
    of_degree = {
        ranks: parameter_layouts(made, degrees=TensorDegrees(() if ranks is None else ((every, ranks),)), **chosen)
        for ranks in {None, *map(degrees.of_layer, kinds)}
    }

    def rows() -> Iterator[ParameterKind]:
        plain = of_degree[None]
        named = zip(plain, rules or (_DEFAULT,) * len(plain), strict=True)
        for at, parameters in groupby(named, lambda named: where(named[0])):
            together = [*parameters]
            for kind in [at] if isinstance(at, str) else [kind for kind in kinds if model.alike[kind] == at]:
                layouts = plain if isinstance(kind, str) else of_degree[degrees.of_layer(kind)]
                for name, those in together:
                    ends = accumulate((share for _, share, _ in those), initial=0.0)
                    for (rule, _, unpruned), between in zip(those, pairwise(ends)):
                        yield ParameterKind(kind, layouts[name], rule, between, unpruned)

    return Kinds(rows())


# ---- Parameters end to end ----


class MatrixGroup(NamedTuple):
    """Matrices of parameters with the same layout: `number` in all, `together` in each parameter.

    The ranks along `axes` divide every matrix into `blocks` blocks.
    """

    number: int
    together: int
    rows: int  # rows of an undivided matrix
    columns: int  # columns of an undivided matrix
    axes: tuple[str, ...]
    blocks: int


class _PartChunks:
    """The parameters of a rank, end to end in chunks."""

    def __init__(self, names: Sequence[str], spec: StateSpec, rows: Sequence[ChunkRow], mesh: Mesh) -> None:
        self.names, self.spec, self.rows, self._mesh = names, spec, rows, mesh
        self._borders: dict[tuple[int, int], Sequence[Sequence[int]]] = {}

    def unpruned(self, share: float | None) -> StateSpec:
        """Returns the specification with this unpruned share of every prunable parameter; None: before pruning."""
        return self.spec._replace(unpruned=dict.fromkeys(self.spec.unpruned, share))

    def borders(self, row: int, parts: int) -> Sequence[Sequence[int]]:
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
    chunk_sizes: ChunkSizes,
    compute: torch.dtype,
    mask_form: MaskForm,
) -> _PartChunks:
    """Lays the parameters of a rank end to end in chunks.

    `alike` has a number for each entry of `kinds.axes`; entries that span the same ranks have equal numbers.
    """
    named = dict(kinds.names(counts))
    unpruned = {name: None for name, kind in named.items() if kind.unpruned < 1}
    spec = StateSpec(compute, {name: kind.rule for name, kind in named.items()}, unpruned, mask_form)
    layouts = {name: kind.layout for name, kind in named.items()}
    rows = end_to_end(layouts, mesh, 0, dict(zip(kinds.axes, alike)), chunk_sizes, spec)
    return _PartChunks(list(named), spec, rows, mesh)


@lru_cache(maxsize=1024)
def _alike(kinds: Kinds, mesh: Mesh) -> tuple[int, ...]:
    found: dict[StridedGroup, int] = {}
    return tuple(found.setdefault(_replicas(axes, mesh), len(found)) for axes in kinds.axes)


def _chunks_of_part(job: Job, counts: PartCounts) -> _PartChunks:
    kinds, least = kinds_of(job), _least(job.mesh, job.mesh.pp if job.parallel.vocabulary else 2)
    compute, pruning = DTYPES[job.train.precision], job.config.pruning
    form = pruning.indices if pruning is not None else "int32"
    return _lay_out(kinds, counts, least, _alike(kinds, job.mesh), ChunkSizes.of_state(job.state), compute, form)


@lru_cache(maxsize=1024)
def _least(mesh: Mesh, stages: int) -> Mesh:
    """Returns a mesh whose ranks have the same slices of parameters as the ranks of `mesh`, with at most `stages`
    stages."""
    data = math.lcm(mesh.tp, mesh.ep * mesh.etp) // mesh.tp
    return Mesh(min(mesh.pp, stages), data, 1, mesh.tp, mesh.ep, mesh.etp, mesh.tp_in)


# ---- Sharded chunks ----


class ChunkGroup:
    """Chunks of a rank with the same replicas, sharding steps and update rule: all compressed, or all dense."""

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        matrices: Sequence[MatrixGroup],
        replicas: StridedGroup,
        steps: tuple[StridedGroup, ...],
        replica_group: StridedGroup,
    ) -> None:
        """Stores the chunks `plans` with their `matrices`.

        The ranks of `replicas` have the same chunks before sharding. `steps` has the group of ranks for each sharding
        step. The ranks of `replica_group` update the same elements.
        """
        self.plans, self.matrices, self.replicas, self.steps = plans, matrices, replicas, steps
        self.replica_group = replica_group
        self.rule, self.depths = plans[0].rule, plans[0].depths

    @cached_property
    def elements(self) -> int:
        """Number of elements in the unsharded chunks, including padding and pruned elements."""
        return sum(plan.size for plan in self.plans)

    def after(self, depth: int) -> int:
        """Returns the most elements on any rank after `depth` sharding steps, without pruned elements."""
        sizes = shard_sizes(self.plans, depth)
        return sizes if isinstance(sizes, int) else int(sizes.max())

    def shards(self, depth: int) -> int:
        """Returns the number of shards of each chunk after `depth` sharding steps."""
        return math.prod(step.size for step in self.steps[:depth])

    @cached_property
    def updated(self) -> int:
        """The most elements that any rank updates."""
        return self.after(self.depths.optimizer)

    def moved(self, first: int, last: int) -> Iterator[tuple[int, StridedGroup]]:
        """Yields (`after(depth)`, group of the collective) for the sharding steps `depth` = `first` to `last` - 1."""
        for depth in range(first, last):
            yield self.after(depth), self.steps[depth]


def held_in(job: Job, stages: Iterable[PartCounts]) -> Iterator[PartCounts]:
    """Yields the parts of the model on a rank with these stages, such that no chunk belongs to two parts."""
    if job.parallel.vocabulary:
        yield PartCounts((), 0, 0, 0)
    tied = 0
    for each in stages:
        yield each._replace(tied=int(each.tied > tied), every=0)
        tied |= each.tied


def chunk_groups(job: Job, stages: Sequence[PartCounts]) -> list[ChunkGroup]:
    """Returns the chunks of a rank with these stages, without offloading.

    In a run with pruning, the chunks have the sparsity after the last pruning.
    """
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
    """Returns the chunks of the parameters in `counts`, an element of `held_in`, with the job's offloading.

    `unpruned` is the fraction of each prunable parameter that pruning leaves; None: before pruning.
    """
    part = _chunks_of_part(job, counts)
    plans = [plan for shared, *_ in _shared(job, part, job.state) for plan in shared]
    if job.state.offload != "none":  # the first chunks may stay on the device
        plans = in_order(plans, part.names)
    return place_chunks(plans, job.state, part.unpruned(unpruned))


def _shared(
    job: Job, part: _PartChunks, options: StateConfig
) -> Iterator[tuple[list[ChunkPlan], StridedGroup, tuple[StridedGroup, ...], StridedGroup]]:
    """Yields (chunks, replicas, groups that shard the chunks in each step, ranks that update the same elements) for
    each row."""
    for number, row in enumerate(part.rows):
        sharding = sharding_of(row.rule, options, small=row.small)
        widths = shard_widths(sharding.shard, sharding.shard_ranks)
        replicas, steps, same, depths = _sharding(row.axes, job.mesh, options.shard_over == "data", widths)
        shards = math.prod(step.size for step in steps)
        copies = job.mesh.axis_size(*row.same) * replicas.size // shards
        planned = chunk_buffers(depths, row.rule, options, part.spec)
        shard_steps = tuple(ShardStep(step.size, 0) for step in steps)
        yield row.sharded(part.borders(number, shards), shard_steps, depths, copies, planned), replicas, steps, same


def _replicas(axes: tuple[str, ...], mesh: Mesh) -> StridedGroup:
    several = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    return group_along(mesh, several) if several else StridedGroup(1)


@lru_cache(maxsize=8192)
def _sharding(
    axes: tuple[str, ...], mesh: Mesh, over_data: bool, widths: tuple[int | None, ...]
) -> tuple[StridedGroup, tuple[StridedGroup, ...], StridedGroup, ShardDepths]:
    """Returns (replicas along `axes`, groups that shard in each step, ranks that update the same elements, depths)."""
    replicas = shared = _replicas(axes, mesh)
    several = 1  # stride of a sharding group, in replicas
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
    """Estimates the largest cost on any of `ranks` ranks, which divide the matrices without splitting any matrix.

    `matrices` are pairs (number of matrices, cost of a matrix).
    """
    number, total = sum(n for n, _ in matrices), sum(n * size for n, size in matrices)
    if ranks == 1:
        return total
    return max(-(-round(number) // ranks) * total / number, *(size for _, size in matrices))


def written(held: Iterable[ChunkGroup], size: Callable[[Rule], float], *, scattered: bool) -> float:
    """Returns the mean bytes per writing rank in a checkpoint.

    `size` returns the bytes that a checkpoint stores per element, by the update rule. With `scattered`, the replicas of
    a shard divide the writing among themselves.
    """
    found = defaultdict[float, float](float)
    for each in held:
        shards = each.replicas.size if scattered else each.shards(each.depths.optimizer)
        found[size(each.rule)] += each.elements / shards  # checkpoints are dense
    return sum(bytes_each * elements for bytes_each, elements in found.items())
