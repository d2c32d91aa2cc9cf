"""Turns a model written for one device into a model for a mesh.

`parallelize` replaces attributes that a module's class lists in `replaceable`. Modules and parameters keep their names.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from optimus.comm import Groups
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct
from optimus.model import CausalModel
from optimus.model.attention import AttentionRows
from optimus.model.causal import BlockRow
from optimus.model.units import replace_all
from optimus.parallel.columns import columns_of
from optimus.parallel.context import sequence_split
from optimus.parallel.dispatch.choice import dispatch_of
from optimus.parallel.norms import norms_of
from optimus.parallel.options import StageOptions
from optimus.parallel.recompute import Recompute, run_unit
from optimus.parallel.tensor import SequenceRows, products, row_gathering
from optimus.parallel.tokens import token_split
from optimus.parallel.vocabulary import vocabulary_split

T = TypeVar("T")
Model = TypeVar("Model", bound=CausalModel)


def parallelize(
    model: Model,
    groups: Groups,
    options: StageOptions,
    gradients: Mapping[nn.Parameter, GradientBuffer] | None = None,
    unit: Callable[..., Any] = run_unit,
    rows: Iterable[BlockRow] = (),
) -> Model:
    """Makes `model` compute with this rank's shards of the parameters, and returns `model`.

    The backward pass adds weight gradients to the buffers in `gradients`; the caller may add buffers later. For `unit`
    see `Recompute`. `rows` are further rows of blocks, such as those of pipeline stages. All ranks must call this
    function.
    """
    replaced: dict[str, Callable[[Any], Any]] = {
        **_over_tensor(groups, options),
        "sequence": always(sequence_split(groups, options)),
        "tokens": always(token_split(groups, options)),
        "dispatch": lambda layer: dispatch_of(groups, options, layer.expert_count),
        # Modules of `transformers` add up partial sums of sharded experts themselves.
        "expert_dispatch": lambda experts: dispatch_of(
            groups, options, experts.expert_count, parts=groups.along(), local=experts.expert_dispatch
        ),
        "vocabulary": always(vocabulary_split(groups, options, model.config.vocab)),
        "gradients": always({} if gradients is None else gradients),
        "step": always(groups.step),
        "columns": always(columns_of(groups)),
    }
    runner = Recompute(options.recomputation, groups.step, unit, keep_collectives=options.keep_collectives)
    replace_all(model, replaced)
    for row in model.rows():
        for layer, block in zip(row.layers, row):
            if (degree := options.degrees.of_layer(layer)) is not None:
                replace_all(block, _over_tensor(groups, options, degree))
    runner.arrange([*model.rows(), *rows], model.units())
    return model


def _over_tensor(groups: Groups, options: StageOptions, degree: int | None = None) -> dict[str, Callable[[Any], Any]]:
    """Returns the replacements for modules that tensor parallelism shards, in layers of `degree` ranks."""
    product = products(groups, options, MatrixProduct(groups.step), degree)
    return {
        "product": lambda projection: product(*projection.dims),
        "norms": lambda norm: norms_of(groups, norm.dim, degree),
        "all_rows": always(row_gathering(groups, options, degree)),
        "rows": always(AttentionRows() if degree is None else SequenceRows(groups, degree)),
    }


def always(value: T) -> Callable[[object], T]:
    """Returns a function that returns `value` for every module."""
    return lambda _: value
