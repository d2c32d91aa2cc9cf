"""What a rank holds of the parameters: from the layouts that training itself would use, counted on meta tensors."""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from optimus.config import ModelConfig
from optimus.config.tree import shard_widths
from optimus.mesh import Layout, Mesh
from optimus.parallel.layouts import parameter_layouts
from optimus.plan.blocks import examples
from optimus.plan.collectives import Place
from optimus.plan.setting import Setting, place
from optimus.state.buffers import Depths
from optimus.state.plan import sharing_steps

# In blocks like that layer, in all blocks, before the blocks, after them, or in both places: a table that embedding and
# output layer share.
Where = int | Literal["blocks", "first", "last", "tied", "every"]


class Kind(NamedTuple):
    """A parameter of this layout, and where it is."""

    where: Where
    layout: Layout


class Held(NamedTuple):
    """Parameters that the same ranks hold: how many elements of them this rank has, and where those ranks lie."""

    elements: float
    replicas: Place
    steps: tuple[Place, ...]  # in which replicas share them out (`state.plan.sharing_steps`)
    depths: Depths

    def after(self, depth: int) -> float:
        """Elements that a rank has after so many steps."""
        return self.elements / self.ways(depth)

    def ways(self, depth: int) -> int:
        """Into how many parts they are then shared out."""
        return math.prod(step.size for step in self.steps[:depth])

    @property
    def own(self) -> float:
        """Elements that a rank updates."""
        return self.after(self.depths.optimizer)

    @property
    def copies(self) -> Place:
        """The ranks that update the same ones."""
        return self.replicas.outer(self.ways(self.depths.optimizer))

    def moved(self, first: int, last: int) -> Iterator[tuple[float, Place]]:
        """(elements, the ranks among which they are gathered or scattered) of the steps from `first` to before `last`."""
        for depth in range(first, last):
            yield self.after(depth), self.steps[depth]


def kinds_of(model: ModelConfig, setting: Setting) -> tuple[Kind, ...]:
    """The parameters of `model`, of blocks of each kind once, laid out as in `setting`."""
    return _kinds(model, setting.sequence, setting.divided_vocabulary)


@lru_cache(maxsize=256)
def _kinds(model: ModelConfig, sequence: bool, vocabulary: bool) -> tuple[Kind, ...]:
    made, layers = examples(model)
    layouts = parameter_layouts(made, sequence=sequence, vocabulary=vocabulary)
    table: Where = "tied" if model.tie_embeddings else "first"

    def where(name: str) -> Where:
        if vocabulary and name.startswith(("embedding.", "head.")):
            return "every"
        before: dict[str, Where] = {"embedding": table, "positions": "first"}
        part, number, *_ = name.split(".")
        return layers[int(number)] if part == "blocks" else before.get(part, "last")

    return tuple(Kind(where(name), layout) for name, layout in layouts.items())


def held_by(kinds: tuple[Kind, ...], setting: Setting, counts: Mapping[Where, int]) -> list[Held]:
    """What a rank with so many blocks of each kind holds, and whether it has the first and the last stage, by replicas."""
    found: dict[tuple[str, ...], float] = {}
    for (where, axes), elements in _sums(kinds, setting.mesh):
        number = counts.get(where, 0)
        if number:
            found[axes] = found.get(axes, 0.0) + number * elements
    over = setting.mesh, setting.shard_over == "data", shard_widths(setting.shard, setting.shard_ranks)
    return [Held(elements, *_places(axes, *over)) for axes, elements in found.items()]


def written(held: Iterable[Held], *, scattered: bool) -> float:
    """Elements that a rank writes into a checkpoint: with `scattered` the ranks that hold the same take turns."""
    return sum(each.elements / each.replicas.size if scattered else each.own for each in held)


@lru_cache(maxsize=1024)
def _sums(kinds: tuple[Kind, ...], mesh: Mesh) -> list[tuple[tuple[Where, tuple[str, ...]], float]]:
    """Elements of a rank, by where they are and who else has them."""
    found: dict[tuple[Where, tuple[str, ...]], float] = {}
    for where, layout in kinds:
        key = where, tuple(axis for axis in layout.replicas if mesh.axis_size(axis) > 1)
        elements = math.prod(layout.shape) / math.prod(mesh.axis_size(axis) for _, axis in layout.splits)
        found[key] = found.get(key, 0.0) + elements
    return list(found.items())


@lru_cache(maxsize=8192)
def _places(
    axes: tuple[str, ...], mesh: Mesh, over_data: bool, widths: tuple[int | None, ...]
) -> tuple[Place, tuple[Place, ...], Depths]:
    """Where the ranks along `axes` lie, and those that share the state out in each step (`state.plan.shard_groups`)."""
    replicas = shared = place(mesh, axes) if axes else Place(1)
    if over_data and axes != ("edp",):
        several = mesh.ep * mesh.etp // math.gcd(mesh.ep * mesh.etp, replicas.stride)
        shared = replicas.outer(several) if several < replicas.size else Place(1)
    if widths[-1] is not None:
        shared = shared.inner(min(widths[-1], shared.size))
    steps, depths = sharing_steps(widths, shared.size)
    before = accumulate(steps, initial=1, func=operator.mul)
    return replicas, tuple(shared.outer(inner).inner(step) for inner, step in zip(before, steps)), depths
