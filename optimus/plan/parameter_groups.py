"""What a rank holds of the parameters: from the layouts that training itself would use, counted on meta tensors."""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

from optimus.config import ModelConfig
from optimus.config.tree import shard_widths
from optimus.mesh import Layout, Mesh
from optimus.mesh.strided import StridedGroup, group_along
from optimus.optim.rule import Rule
from optimus.parallel.layouts import parameter_layouts
from optimus.plan.blocks import Factors, examples
from optimus.plan.job import Job, Rules
from optimus.resolve.rules import default_rule
from optimus.state.buffers import Depths
from optimus.state.plan import Piece, chunk_limit, divide, sharing_steps
from optimus.state.tiling import TILINGS

_DEFAULT = ((default_rule(), 1.0, 1.0),)

# In blocks like that layer, before the blocks, after them, or in both places: a table that embedding and output layer share.
Where = int | Literal["first", "last", "tied", "every"]
_Key = tuple[tuple[str, ...], Rule, float]  # the axes of those that hold the same, the update rule, the unpruned share


class ParameterKind(NamedTuple):
    """A parameter of this layout, and where it is; `share` of those that are alike have this update rule, and of these the
    share `unpruned` is left."""

    where: Where
    layout: Layout
    rule: Rule
    share: float
    unpruned: float


class PartCounts(NamedTuple):
    """What a stage or a rank has of the model."""

    kinds: tuple[tuple[int, int], ...]  # of each kind of block its first layer, and how many there are
    first: int  # whether it has what is before the blocks
    last: int
    tied: int  # whether a table that both ends share
    every: int = 1  # a part of what all stages have

    @property
    def blocks(self) -> int:
        """Of all kinds."""
        return sum(number for _, number in self.kinds)

    def of(self, where: Where) -> int:
        """Of one kind of block, or whether it has that."""
        if isinstance(where, str):
            return int(getattr(self, where))
        return dict(self.kinds).get(where, 0)


class Kinds:
    """The kinds of a model's parameters; there is one for the same layouts (`_kinds`)."""

    def __init__(self, rows: Iterable[ParameterKind]) -> None:
        self.rows = tuple(rows)


class MatrixGroup(NamedTuple):
    """So many matrices of parameters alike, each of which has `together` of them; ranks along `axes` have blocks of each."""

    number: float
    together: int
    rows: int  # of a whole one
    columns: int
    axes: tuple[str, ...]
    blocks: int

    @property
    def size(self) -> float:
        """Elements of a block."""
        return self.rows * self.columns / self.blocks


class ParameterGroup(NamedTuple):
    """Parameters that the same ranks hold and one rule updates: how many elements of them this rank has, where those ranks
    lie, and of a rule of matrices which these are."""

    elements: float
    rule: Rule
    matrices: tuple[MatrixGroup, ...]
    replicas: StridedGroup
    steps: tuple[StridedGroup, ...]  # in which replicas share them out (`state.plan.sharing_steps`)
    depths: Depths
    runs: tuple[tuple[Piece, ...], ...] = ()  # of a rule of matrices: what is laid end to end, in order
    limit: int = 0  # elements of a chunk of it
    unpruned: float = 1.0  # share of them that has state, and is sent

    @property
    def pruned(self) -> bool:
        """Whether some are: whole parameters are dense all the same, and zero where they are pruned."""
        return self.unpruned < 1

    def after(self, depth: int) -> float:
        """Unpruned elements that a rank has after so many steps; of a rule of matrices, the rank that has most."""
        if not self.matrices:
            return self.unpruned * self.elements / self.shards(depth)
        shards, ways = self.shards(len(self.steps)), self.shards(depth)
        return sum(max(_parts(run, self.rule, self.limit, shards, ways)) for run in self.runs)

    def shards(self, depth: int) -> int:
        """Into how many parts they are then shared out."""
        return math.prod(step.size for step in self.steps[:depth])

    @property
    def updated(self) -> float:
        """Elements that a rank updates."""
        return self.after(self.depths.optimizer)

    @property
    def replica_group(self) -> StridedGroup:
        """The ranks that update the same ones."""
        return self.replicas.outer(self.shards(self.depths.optimizer))

    def moved(self, first: int, last: int) -> Iterator[tuple[float, StridedGroup]]:
        """(elements, the ranks among which they are gathered or scattered) of the steps from `first` to before `last`."""
        for depth in range(first, last):
            yield self.after(depth), self.steps[depth]


@lru_cache(maxsize=8192)
def _parts(run: tuple[Piece, ...], rule: Rule, limit: int, shards: int, ways: int) -> list[int]:
    """Elements of each of so many parts that consist of so many shards, as a run divides its chunks."""
    sizes = [0] * ways
    for _, ends in divide(run, rule, limit, shards):
        for part, (start, end) in enumerate(pairwise(ends[:: shards // ways])):
            sizes[part] += end - start
    return sizes


def max_load(matrices: Sequence[tuple[float, float]], ranks: int) -> float:
    """The most that one of `ranks` takes for so many whole matrices, each at such a cost, about: as many of the mean one as
    any has, and one of the largest at least."""
    number, total = sum(n for n, _ in matrices), sum(n * size for n, size in matrices)
    if ranks == 1:
        return total
    return max(-(-round(number) // ranks) * total / number, *(size for _, size in matrices))


def kinds_of(job: Job) -> Kinds:
    """The parameters of its model, of blocks of each kind once, as the job lays them out."""
    return _kinds(job.model, job.parallel.splits_sequence, job.parallel.vocabulary, job.rules, job.factors)


@lru_cache(maxsize=256)
def _kinds(model: ModelConfig, sequence: bool, vocabulary: bool, rules: Rules, factors: Factors) -> Kinds:
    made, layers = examples(model, factors)
    layouts = parameter_layouts(made, sequence=sequence, vocabulary=vocabulary)
    table: Where = "tied" if model.tie_embeddings else "first"

    def where(name: str) -> Where:
        if vocabulary and name.startswith(("embedding.", "head.")):
            return "every"
        before: dict[str, Where] = {"embedding": table, "positions": "first"}
        part, number, *_ = name.split(".")
        return layers[int(number)] if part == "blocks" else before.get(part, "last")

    return Kinds(
        ParameterKind(where(name), layout, *each)
        for (name, layout), those in zip(layouts.items(), rules or (_DEFAULT,) * len(layouts), strict=True)
        for each in those
    )


def parameter_groups(job: Job, counts: PartCounts) -> list[ParameterGroup]:
    """What a rank with so much of the model holds, by replicas and update rule."""
    kinds = kinds_of(job)
    found: dict[_Key, tuple[float, list[MatrixGroup]]] = {}
    for (where, key), (elements, matrices) in _sums(kinds, job.mesh):
        number = counts.of(where)
        if number:
            before, those = found.get(key, (0.0, []))
            those += [each._replace(number=number * each.number) for each in matrices]
            found[key] = before + number * elements, those
    state = job.state
    over = job.mesh, state.shard_over == "data", shard_widths(state.shard, state.shard_ranks)
    runs: Mapping[_Key, tuple[tuple[Piece, ...], ...]] = {}
    limit = 0
    if any(matrices for _, matrices in found.values()):
        runs, limit = _runs(kinds, job.mesh, counts, state.chunk)
    return [
        ParameterGroup(
            elements,
            rule,
            tuple(matrices),
            *_places(axes, *over),
            runs.get((axes, rule, unpruned), ()),
            limit,
            unpruned,
        )
        for (axes, rule, unpruned), (elements, matrices) in found.items()
    ]


def written(held: Iterable[ParameterGroup], size: Callable[[Rule], float], *, scattered: bool) -> float:
    """Bytes that a rank writes into a checkpoint of `size` bytes per element: with `scattered` the ranks that hold the same
    take turns."""
    found = defaultdict[float, float](float)
    for each in held:
        shards = each.replicas.size if scattered else each.shards(each.depths.optimizer)
        found[size(each.rule)] += each.elements / shards  # dense, whatever is pruned
    return sum(bytes_each * elements for bytes_each, elements in found.items())


@lru_cache(maxsize=1024)
def _keys(kinds: Kinds, mesh: Mesh) -> list[_Key]:
    """Of each of `kinds`; two sets of axes may be the same ranks."""
    known: dict[StridedGroup, tuple[str, ...]] = {}
    found = []
    for _, layout, rule, _, unpruned in kinds.rows:
        axes = tuple(axis for axis in layout.partial_axes if mesh.axis_size(axis) > 1)
        found.append((known.setdefault(group_along(mesh, axes) if axes else StridedGroup(1), axes), rule, unpruned))
    return found


@lru_cache(maxsize=1024)
def _runs(
    kinds: Kinds, mesh: Mesh, counts: PartCounts, chosen: int | None
) -> tuple[Mapping[_Key, tuple[tuple[Piece, ...], ...]], int]:
    """(what a rank with so many blocks of each kind lays end to end into chunks, the most elements of a chunk).

    Blocks of one kind come before those of the next, whatever their order is.
    """
    found: dict[tuple[_Key, tuple[str, ...]], list[Piece]] = {}
    for where, alike in groupby(zip(kinds.rows, _keys(kinds, mesh)), key=lambda each: each[0].where):
        number, those = counts.of(where), list(alike)
        for block in range(number):
            for (_, layout, _, share, _), key in those:
                if block < round(share * number):
                    same = tuple(axis for axis in layout.replicated_axes if mesh.axis_size(axis) > 1)
                    local = layout.local_shape(mesh)
                    found.setdefault((key, same), []).append(Piece(math.prod(local), local, layout.shape))
    limit = chunk_limit([[piece.room for piece in run] for run in found.values()], chosen)
    runs = defaultdict[_Key, tuple[tuple[Piece, ...], ...]](tuple)
    for (key, _), run in found.items():
        runs[key] += (tuple(run),)
    return runs, limit


@lru_cache(maxsize=1024)
def _sums(kinds: Kinds, mesh: Mesh) -> list[tuple[tuple[Where, _Key], tuple[float, list[MatrixGroup]]]]:
    """Elements of a rank, and those that are matrices to their rule, by where they are, who else has them, and the rule."""
    found: dict[tuple[Where, _Key], tuple[float, list[MatrixGroup]]] = {}
    for (where, layout, rule, share, _), alike in zip(kinds.rows, _keys(kinds, mesh)):
        key = where, alike
        elements = math.prod(layout.shape) / math.prod(mesh.axis_size(axis) for _, axis in layout.sharded_dims)
        before, matrices = found.get(key, (0.0, []))
        tiling = TILINGS[rule.tiling]
        for each in tiling.matrices(0, layout.local_shape(mesh), layout.shape):
            axes = tiling.split_axes(layout, mesh)
            blocks = mesh.axis_size(*axes)
            rows, columns = layout.shape[-2:]
            matrices.append(MatrixGroup(share * each.number, each.number, rows, columns, axes, blocks))
        found[key] = before + share * elements, matrices
    return list(found.items())


@lru_cache(maxsize=8192)
def _places(
    axes: tuple[str, ...], mesh: Mesh, over_data: bool, widths: tuple[int | None, ...]
) -> tuple[StridedGroup, tuple[StridedGroup, ...], Depths]:
    """Where the ranks along `axes` lie, and those that share the state out in each step (`state.plan.shard_groups`)."""
    replicas = shared = group_along(mesh, axes) if axes else StridedGroup(1)
    if over_data and axes != ("edp",):
        several = mesh.ep * mesh.etp // math.gcd(mesh.ep * mesh.etp, replicas.stride)
        shared = replicas.outer(several) if several < replicas.size else StridedGroup(1)
    if widths[-1] is not None:
        shared = shared.inner(min(widths[-1], shared.size))
    steps, depths = sharing_steps(widths, shared.size)
    before = accumulate(steps, initial=1, func=operator.mul)
    return replicas, tuple(shared.outer(inner).inner(step) for inner, step in zip(before, steps)), depths
