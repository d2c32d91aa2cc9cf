"""The chunks of a rank that stands for those of its stages, as its run divides them, and the ranks that share them.

How parameters lie in chunks depends on the parts that a rank has of them, and is found once for all jobs that have the same;
how many ranks share the chunks out only says where their shards begin.
"""

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Literal, NamedTuple

import torch

from optimus.config import ModelConfig
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
from optimus.state.buffers import Depths
from optimus.state.masks import MaskForm
from optimus.state.plan import (
    ChunkPlan,
    ChunkRow,
    Recipe,
    ShardStep,
    chunk_buffers,
    end_to_end,
    in_order,
    place_chunks,
    sharding_of,
    sharing_steps,
)
from optimus.state.tiling import TILINGS

_DEFAULT = ((default_rule(), 1.0, 1.0),)

# In blocks like that layer, before the blocks, after them, or in both places: a table that embedding and output layer share.
Where = int | Literal["first", "last", "tied", "every"]


# ---- What a model has ----


class ParameterKind(NamedTuple):
    """A parameter of this layout, and where it is. Of those that are alike the ones between two fractions have this update
    rule; of these the share `unpruned` is left."""

    where: Where
    layout: Layout
    rule: Rule
    between: tuple[float, float]
    unpruned: float


class PartCounts(NamedTuple):
    """What a stage or a rank has of the model."""

    layers: tuple[int, ...]  # its blocks, each by the first layer of its kind
    first: int  # whether it has what is before the blocks
    last: int
    tied: int  # whether a table that both ends share
    every: int = 1  # a part of what all stages have

    @property
    def blocks(self) -> int:
        """Of all kinds."""
        return len(self.layers)

    def of(self, where: Where) -> int:
        """Of one kind of block, or whether it has that."""
        return int(getattr(self, where)) if isinstance(where, str) else self.layers.count(where)


class Kinds:
    """The kinds of a model's parameters; there is one for the same layouts (`_kinds`)."""

    def __init__(self, rows: Iterable[ParameterKind]) -> None:
        self.rows = tuple(rows)
        self.axes = tuple(dict.fromkeys(kind.layout.partial_axes for kind in self.rows))

    def names(self, counts: PartCounts) -> Iterator[tuple[str, ParameterKind]]:
        """Those of a rank with so much of the model, in its order, each with a name."""
        parts = [(where, list(rows)) for where, rows in groupby(enumerate(self.rows), key=lambda row: row[1].where)]
        blocks = {where: rows for where, rows in parts if isinstance(where, int)}
        before = sum(1 for _ in takewhile(lambda part: part[0] not in blocks, parts))
        after = before + len(blocks)
        done = Counter[Where]()
        for where, rows in *parts[:before], *((layer, blocks[layer]) for layer in counts.layers), *parts[after:]:
            number = counts.of(where)
            for row, kind in rows if number else ():
                low, high = kind.between
                if round(low * number) <= done[where] < round(high * number):
                    yield f"{row}.{done[where]}", kind
            done[where] += isinstance(where, int)


def kinds_of(job: Job) -> Kinds:
    """The parameters of its model, of blocks of each kind once, as the job lays them out."""
    return _kinds(job.model, job.rules, job.factors, *layout_options(job.config).items())


@lru_cache(maxsize=256)
def _kinds(model: ModelConfig, rules: Rules, factors: Factors, *options: tuple[str, bool]) -> Kinds:
    (made, layers), chosen = examples(model, factors), dict(options)
    layouts, vocabulary = parameter_layouts(made, **chosen), chosen["vocabulary"]
    table: Where = "tied" if model.tie_embeddings else "first"

    def where(name: str) -> Where:
        if vocabulary and name.startswith(("embedding.", "head.")):
            return "every"
        before: dict[str, Where] = {"embedding": table, "positions": "first"}
        part, number, *_ = name.split(".")
        return layers[int(number)] if part == "blocks" else before.get(part, "last")

    def rows() -> Iterator[ParameterKind]:
        for (name, layout), those in zip(layouts.items(), rules or (_DEFAULT,) * len(layouts), strict=True):
            ends = accumulate((share for _, share, _ in those), initial=0.0)
            for (rule, _, unpruned), between in zip(those, pairwise(ends)):
                yield ParameterKind(where(name), layout, rule, between, unpruned)

    return Kinds(rows())


# ---- End to end ----


class MatrixGroup(NamedTuple):
    """So many matrices of parameters alike, each of which has `together` of them; ranks along `axes` have blocks of each."""

    number: int
    together: int
    rows: int  # of a whole one
    columns: int
    axes: tuple[str, ...]
    blocks: int


class _Rows:
    """What a rank has of the parameters, end to end in chunks; the borders of their shards are found once."""

    def __init__(self, names: Sequence[str], recipe: Recipe, rows: Sequence[ChunkRow], mesh: Mesh) -> None:
        self.names, self.recipe, self.rows, self._mesh = names, recipe, rows, mesh
        self._borders: dict[tuple[int, int], Sequence[Sequence[int]]] = {}

    def unpruned(self, share: float | None) -> Recipe:
        """What is kept when such a share is left of what is pruned at some time; None: before that."""
        return self.recipe._replace(unpruned=dict.fromkeys(self.recipe.unpruned, share))

    def borders(self, row: int, parts: int) -> Sequence[Sequence[int]]:
        """Of the chunks of one of the rows, shared out over so many ranks."""
        if (row, parts) not in self._borders:
            self._borders[row, parts] = self.rows[row].borders(parts)
        return self._borders[row, parts]

    @cached_property
    def matrices(self) -> Sequence[Sequence[MatrixGroup]]:
        """Those of each row."""
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
def _rows(
    kinds: Kinds,
    counts: PartCounts,
    mesh: Mesh,
    alike: tuple[int, ...],
    chunk: int | None,
    compute: torch.dtype,
    mask_form: MaskForm,
) -> _Rows:
    """`alike`: equal numbers for those of `kinds.axes` along which the same ranks lie."""
    named = dict(kinds.names(counts))
    unpruned = {name: None for name, kind in named.items() if kind.unpruned < 1}
    recipe = Recipe(compute, {name: kind.rule for name, kind in named.items()}, unpruned, mask_form)
    layouts = {name: kind.layout for name, kind in named.items()}
    return _Rows(list(named), recipe, end_to_end(layouts, mesh, 0, dict(zip(kinds.axes, alike)), chunk, recipe), mesh)


@lru_cache(maxsize=1024)
def _alike(kinds: Kinds, mesh: Mesh) -> tuple[int, ...]:
    found: dict[StridedGroup, int] = {}
    return tuple(found.setdefault(_replicas(axes, mesh), len(found)) for axes in kinds.axes)


def _rows_of(job: Job, counts: PartCounts) -> _Rows:
    kinds, least = kinds_of(job), _least(job.mesh, job.mesh.pp if job.parallel.vocabulary else 2)
    compute, pruning = DTYPES[job.train.precision], job.config.pruning
    form = pruning.indices if pruning is not None else "int32"
    return _rows(kinds, counts, least, _alike(kinds, job.mesh), job.state.chunk, compute, form)


@lru_cache(maxsize=1024)
def _least(mesh: Mesh, stages: int) -> Mesh:
    """One whose ranks have the same parts of parameters, with so many stages at most and as few replicas as can be."""
    data = math.lcm(mesh.tp, mesh.ep * mesh.etp) // mesh.tp
    return Mesh(min(mesh.pp, stages), data, 1, mesh.tp, mesh.ep, mesh.etp, mesh.tp_in)


# ---- Shared out ----


class ChunkGroup:
    """Chunks of a rank that the same ranks hold and one rule updates, and where these ranks lie."""

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        matrices: Sequence[MatrixGroup],
        replicas: StridedGroup,
        steps: tuple[StridedGroup, ...],
    ) -> None:
        """`replicas` share the chunks out in such `steps` (`state.plan.sharing_steps`); of a rule of matrices they are
        these."""
        self.plans, self.matrices, self.replicas, self.steps = plans, matrices, replicas, steps
        self.rule, self.depths = plans[0].rule, plans[0].depths

    @cached_property
    def elements(self) -> int:
        """Of whole chunks: they are dense, and zero where they are pruned."""
        return sum(plan.size for plan in self.plans)

    def after(self, depth: int) -> int:
        """Unpruned elements that a rank has after so many steps; of a rule of matrices, the rank that has most."""
        ways = self.shards(depth)
        if all(plan.tiling.equal for plan in self.plans):
            return sum(plan.borders[-1] for plan in self.plans) // ways
        parts = [0] * ways
        for plan in self.plans:
            for part, (start, end) in enumerate(pairwise(plan.borders[:: plan.shard_count // ways])):
                parts[part] += end - start
        return max(parts)

    def shards(self, depth: int) -> int:
        """Into how many parts they are then shared out."""
        return math.prod(step.size for step in self.steps[:depth])

    @cached_property
    def updated(self) -> int:
        """Elements that a rank updates."""
        return self.after(self.depths.optimizer)

    @property
    def replica_group(self) -> StridedGroup:
        """The ranks that update the same ones."""
        return self.replicas.outer(self.shards(self.depths.optimizer))

    def moved(self, first: int, last: int) -> Iterator[tuple[int, StridedGroup]]:
        """(elements, the ranks among which they are gathered or scattered) of the steps from `first` to before `last`."""
        for depth in range(first, last):
            yield self.after(depth), self.steps[depth]


def held_in(job: Job, stages: Iterable[PartCounts]) -> Iterator[PartCounts]:
    """What a rank holds by these stages, none of whose chunks is of two: a table that embedding and output layer share once;
    and by none of them its part of a vocabulary that all ranks share."""
    if job.parallel.vocabulary:
        yield PartCounts((), 0, 0, 0)
    tied = 0
    for each in stages:
        yield each._replace(tied=int(each.tied > tied), every=0)
        tied |= each.tied


def chunk_groups(job: Job, stages: Sequence[PartCounts]) -> list[ChunkGroup]:
    """What a rank with so much of the model in its stages holds, all on its device, by replicas and update rule; of a run
    that prunes, at its end."""
    state = job.state if job.state.offload == "none" else job.state.model_copy(update={"offload": "none"})
    left = 1 - job.config.pruning.sparsity if job.config.pruning is not None else None
    found: dict[tuple[object, ...], ChunkGroup] = {}
    for counts in held_in(job, stages):
        rows = _rows_of(job, counts)
        for row, matrices, (plans, replicas, steps) in zip(rows.rows, rows.matrices, _shared(job, rows, state)):
            kept = place_chunks(plans, state, rows.unpruned(left))
            key = row.rule, kept[0].mask is None, replicas, steps
            before = found.get(key)
            found[key] = ChunkGroup(
                [*(before.plans if before else ()), *kept],
                [*(before.matrices if before else ()), *matrices],
                replicas,
                steps,
            )
    return [*found.values()]


def chunk_plans(job: Job, counts: PartCounts) -> list[ChunkPlan]:
    """The chunks of a stage with so much of the model, where the job has them; of a run that prunes, when they take most."""
    rows = _rows_of(job, counts)
    plans = [plan for shared, *_ in _shared(job, rows, job.state) for plan in shared]
    if job.state.offload != "none":  # the first ones may stay there
        plans = in_order(plans, rows.names)
    pruning = job.config.pruning
    first = pruning.unpruned(0) if pruning is not None and pruning.comes_first else None
    return place_chunks(plans, job.state, rows.unpruned(first))


def _shared(
    job: Job, rows: _Rows, options: StateConfig
) -> Iterator[tuple[list[ChunkPlan], StridedGroup, tuple[StridedGroup, ...]]]:
    """Of each row its chunks, where their replicas lie, and those that share them out in each step."""
    for number, row in enumerate(rows.rows):
        sharding = sharding_of(row.rule, options)
        widths = shard_widths(sharding.shard, sharding.shard_ranks)
        replicas, steps, depths = _places(row.axes, job.mesh, options.shard_over == "data", widths)
        shards = math.prod(step.size for step in steps)
        copies = job.mesh.axis_size(*row.same) * replicas.size // shards
        kept, shard_steps = (
            chunk_buffers(depths, row.rule, options, rows.recipe),
            tuple(ShardStep(step.size, 0) for step in steps),
        )
        yield row.sharded(rows.borders(number, shards), shard_steps, depths, copies, kept), replicas, steps


def _replicas(axes: tuple[str, ...], mesh: Mesh) -> StridedGroup:
    """Where the ranks along `axes` lie."""
    several = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    return group_along(mesh, several) if several else StridedGroup(1)


@lru_cache(maxsize=8192)
def _places(
    axes: tuple[str, ...], mesh: Mesh, over_data: bool, widths: tuple[int | None, ...]
) -> tuple[StridedGroup, tuple[StridedGroup, ...], Depths]:
    """Where the ranks along `axes` lie, and those that share the state out in each step (`state.plan.shard_groups`)."""
    replicas = shared = _replicas(axes, mesh)
    if over_data and axes != ("edp",):
        several = mesh.ep * mesh.etp // math.gcd(mesh.ep * mesh.etp, replicas.stride)
        shared = replicas.outer(several) if several < replicas.size else StridedGroup(1)
    if widths[-1] is not None:
        shared = shared.inner(min(widths[-1], shared.size))
    steps, depths = sharing_steps(widths, shared.size)
    before = accumulate(steps, initial=1, func=operator.mul)
    return replicas, tuple(shared.outer(inner).inner(step) for inner, step in zip(before, steps)), depths


# ---- Sums ----


def max_load(matrices: Sequence[tuple[float, float]], ranks: int) -> float:
    """The most that one of `ranks` takes for so many whole matrices, each at such a cost, about: as many of the mean one as
    any has, and one of the largest at least."""
    number, total = sum(n for n, _ in matrices), sum(n * size for n, size in matrices)
    if ranks == 1:
        return total
    return max(-(-round(number) // ranks) * total / number, *(size for _, size in matrices))


def written(held: Iterable[ChunkGroup], size: Callable[[Rule], float], *, scattered: bool) -> float:
    """Bytes that a rank writes into a checkpoint of `size` bytes per element: with `scattered` the ranks that hold the same
    take turns."""
    found = defaultdict[float, float](float)
    for each in held:
        shards = each.replicas.size if scattered else each.shards(each.depths.optimizer)
        found[size(each.rule)] += each.elements / shards  # dense, whatever is pruned
    return sum(bytes_each * elements for bytes_each, elements in found.items())
