"""Builds one block of each kind on the meta device, and lists its matmuls from the parameter declarations.

Layers with the same entry in `alike` are of one kind. The entry, the index of the kind's first layer, identifies the
kind.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import torch
from torch import nn

from optimus.config import Architecture, ModelConfig
from optimus.model import CausalModel
from optimus.model.build import causal_model
from optimus.model.linear import Factored
from optimus.model.parameters import Dim, declarations
from optimus.model.units import units_of
from optimus.parallel.layouts import RULES

Over = Literal["outputs", "inputs", "nothing"]
_DIVIDING = ("tp_out", "etp")  # the mesh axes of `Projection.over`


class Projection(NamedTuple):
    """A weight matrix, or several matrices that one matmul multiplies by the same input.

    `over` is the side that `tp_out` divides or, in a routed expert, `etp`.
    """

    inputs: int
    outputs: int
    over: Over


class BlockModules(NamedTuple):
    """The projections of a block, and the number of norms outside attention.

    `dense` has the projections of the feed-forward layer or of the shared experts; `expert` has the projections of one
    routed expert.
    """

    attention: tuple[Projection, ...]
    dense: tuple[Projection, ...]
    expert: tuple[Projection, ...]
    norms: int


Factors = tuple[tuple[str, int], ...]  # for each projection with low-rank factors: (name, rank of the factors)


class Examples(NamedTuple):
    """A model on the meta device, with parameters in one block of each kind and in all modules outside the blocks.

    `layers` maps the number of a block in `model` to the first layer of the block's kind.
    """

    model: CausalModel
    layers: Mapping[int, int]


@lru_cache(maxsize=256)
def examples(model: Architecture, factors: Factors = ()) -> Examples:
    """Returns the `Examples` of `model`. A projection in `factors` gets low-rank factors in the block of its kind."""
    kinds = sorted(set(model.alike))
    with torch.device("meta"):
        made = causal_model(model, layers=kinds)
        numbers = range(len(kinds)) if len(made.blocks) == len(kinds) else kinds
        layers = dict(zip(numbers, kinds, strict=True))
        made.keep(layers, first=True, last=True, embedding=True, head=True)
        numbers_of = {kind: number for number, kind in layers.items()}
        for name, rank in dict.fromkeys((_example_name(model, numbers_of, name), rank) for name, rank in factors):
            cast(Factored, made.get_submodule(name)).add_factors(rank)
    return Examples(made, layers)


def _example_name(model: Architecture, numbers: Mapping[int, int], name: str) -> str:
    if (block := model.parts.block_of(name)) is None:
        return name
    before = f"{model.parts.blocks}."
    return f"{before}{numbers[model.alike[block]]}{name.removeprefix(f'{before}{block}')}"


@lru_cache(maxsize=256)
def blocks_of(model: ModelConfig) -> Mapping[int, BlockModules]:
    """Maps the first layer of each kind to the `BlockModules` of the kind."""
    made, layers = examples(model)
    return {layer: _block(made.blocks[number]) for number, layer in layers.items()}


def _block(block: nn.Module) -> BlockModules:
    attention, dense, expert = list[Projection](), list[Projection](), list[Projection]()
    for name, declared in declarations(block):
        if declared.role not in ("matrix", "expert"):
            continue
        sizes = dict(zip(declared.dims, block.get_parameter(name).shape))
        own = expert if sizes.pop("experts", 0) else attention if name.startswith("attention.") else dense
        projection = _projection(sizes)
        if own and projection[::2] == own[-1][::2]:  # assumes the same input, so one matmul
            projection = projection._replace(outputs=projection.outputs + own.pop().outputs)
        own.append(projection)
    norms = sum(kind == "norm" for unit in units_of(block) for kind, _ in unit.steps)
    return BlockModules(tuple(attention), tuple(dense), tuple(expert), norms)


def _projection(sizes: dict[Dim, int]) -> Projection:
    *outputs, inputs = sizes
    divided = [dim for dim in sizes if RULES.get(dim) in _DIVIDING]
    over: Over = "inputs" if inputs in divided else "outputs" if divided else "nothing"
    return Projection(sizes[inputs], math.prod(sizes[dim] for dim in outputs), over)
