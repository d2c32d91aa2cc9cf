"""What a rank holds of the parameters: from the layouts that training itself would use, counted on meta tensors.

A model of another program than this has no modules here; its layouts are made from its shapes, in the same form.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from optimus.config import ModelConfig
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.parallel.layouts import parameter_layouts
from optimus.plan.architecture import Architecture, Projection
from optimus.plan.collectives import Place
from optimus.plan.setting import Setting, place

# Of blocks of a kind, before the blocks, after them, or in both places: a table that embedding and output layer share.
Where = Literal["dense", "sparse", "first", "last", "tied", "every"]


class Kind(NamedTuple):
    """A parameter of this layout, and where it is."""

    where: Where
    layout: Layout


class Held(NamedTuple):
    """Parameters that the same ranks hold: how many elements of them this rank has, and where those ranks lie."""

    elements: float
    replicas: Place
    shared: Place  # of the replicas, those that share the state out; of size 1 with shard: none


def kinds_of_model(model: ModelConfig, *, sequence: bool, tied_ends: bool, vocabulary: bool) -> tuple[Kind, ...]:
    """Of a model of this library: of the blocks of each kind one is built, without memory."""
    examples: dict[Where, int] = {}
    for layer in range(model.layers):
        examples.setdefault("sparse" if model.experts_of(layer) else "dense", layer)
    with torch.device("meta"):
        whole = Transformer(model, layers=examples.values())
    layouts = parameter_layouts(whole, sequence=sequence, tied_ends=tied_ends, vocabulary=vocabulary)
    kinds = list(examples)
    table: Where = "tied" if model.tie_embeddings else "first"

    def where(name: str) -> Where:
        if vocabulary and name.startswith(("embedding.", "head.")):
            return "every"
        before: dict[str, Where] = {"embedding": table, "positions": "first"}
        part, number, *_ = name.split(".")
        return kinds[int(number)] if part == "blocks" else before.get(part, "last")

    return tuple(Kind(where(name), layout) for name, layout in layouts.items())


@lru_cache(maxsize=256)
def kinds_of_shapes(architecture: Architecture) -> tuple[Kind, ...]:
    """Of any architecture, from its projections."""
    a = architecture
    blocks: list[tuple[Where, Iterable[Projection]]] = []
    if a.layers > a.sparse_layers:
        blocks.append(("dense", [*a.attention(), *a.feed_forward(a.intermediate)]))
    if a.sparse_layers:
        shared = a.feed_forward(a.shared_intermediate) if a.shared_intermediate else []
        blocks.append(("sparse", [*a.attention(), a.router(), *shared]))
    kinds = [Kind(where, _layout(each)) for where, projections in blocks for each in projections]
    if a.sparse_layers:
        for each in a.feed_forward(a.expert_intermediate):
            shape, dim = (a.experts, each.outputs, each.inputs), 1 if each.over == "outputs" else 2
            kinds.append(Kind("sparse", Layout(shape, ((0, "ep"), (dim, "etp")), ("edp",))))
    table = Layout((a.vocab, a.hidden), ((0, "tp_out"), (1, "tp_in")), ("dp", "cp"))
    ends: tuple[Where, ...] = ("tied",) if a.tied else ("first", "last")
    return (*kinds, *(Kind(where, table) for where in ends))


def _layout(projection: Projection) -> Layout:
    shape = (projection.outputs, projection.inputs)
    outer, inner = ("tp_out", "tp_in") if projection.over == "outputs" else ("tp_in", "tp_out")
    splits = () if projection.over == "nothing" else ((0, outer), (1, inner))
    return Layout(shape, splits, ("dp", "cp"))


def held_by(kinds: tuple[Kind, ...], setting: Setting, counts: Mapping[Where, int]) -> list[Held]:
    """What a rank with so many blocks of each kind holds, and whether it has the first and the last stage, by replicas."""
    found: dict[tuple[str, ...], float] = {}
    for (where, axes), elements in _sums(kinds, setting.mesh):
        number = counts.get(where, 0)
        if number:
            found[axes] = found.get(axes, 0.0) + number * elements
    over = setting.mesh, setting.shard != "none", setting.shard_over == "data", setting.shard_ranks
    return [Held(elements, *_places(axes, *over)) for axes, elements in found.items()]


def written(held: Iterable[Held], *, scattered: bool) -> float:
    """Elements that a rank writes into a checkpoint: with `scattered` the ranks that hold the same take turns."""
    return sum(each.elements / (each.replicas if scattered else each.shared).size for each in held)


@lru_cache(maxsize=1024)
def _sums(kinds: tuple[Kind, ...], mesh: Mesh) -> list[tuple[tuple[Where, tuple[str, ...]], float]]:
    """Elements of a rank, by where they are and who else has them."""
    found: dict[tuple[Where, tuple[str, ...]], float] = {}
    for where, layout in kinds:
        key = where, layout.replicas
        found[key] = found.get(key, 0.0) + _elements(layout, mesh)
    return list(found.items())


def _elements(layout: Layout, mesh: Mesh) -> float:
    return math.prod(layout.shape) / math.prod(mesh.axis_size(axis) for _, axis in layout.splits)


@lru_cache(maxsize=8192)
def _places(
    axes: tuple[str, ...], mesh: Mesh, sharded: bool, over_data: bool, width: int | None
) -> tuple[Place, Place]:
    """Where the ranks along `axes` lie, and those that share the state out (`state.plan.shard_groups`)."""
    present = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    replicas = place(mesh, present) if present else Place(1)
    if not sharded or replicas.size == 1:
        return replicas, Place(1)
    shared = replicas
    if over_data and axes != ("edp",):
        several = mesh.ep * mesh.etp // math.gcd(mesh.ep * mesh.etp, replicas.stride)
        shared = replicas.outer(several) if several < replicas.size else Place(1)
    if width is not None:
        shared = shared.inner(min(width, shared.size))
    return replicas, shared
