"""A model of one device becomes one of a mesh. `parallelize` is one list of lines, in which order does not matter; each says
how some modules do their part of the work from then on. Names and parameters stay: what a rank holds of each is another
question (`layouts.py`).

What may be replaced, a class says itself (`replaceable`), so a module of a user's own is divided as ours are.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from optimus.comm import Groups
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct
from optimus.model import Transformer
from optimus.model.transformer import Blocks
from optimus.model.units import replace_all, units_of
from optimus.parallel.context import sequence_split
from optimus.parallel.dispatch.choice import dispatch_of
from optimus.parallel.norms import norms_of
from optimus.parallel.options import StageOptions
from optimus.parallel.recompute import Recompute, run_unit
from optimus.parallel.tensor import products, row_gathering
from optimus.parallel.tokens import token_split
from optimus.parallel.vocabulary import vocabulary_split

T = TypeVar("T")


def parallelize(
    model: Transformer,
    groups: Groups,
    options: StageOptions,
    gradients: Mapping[nn.Parameter, GradientBuffer] | None = None,
    unit: Callable[..., Any] = run_unit,
    rows: Iterable[Blocks] = (),
) -> Transformer:
    """`model`, or what a rank's stages have left of it, made to work on this rank's parts of its parameters.

    Gradients of weights go to their buffers in `gradients`, which may be filled later. `unit` runs a unit, whose parameters
    need not be here before (`Recompute`). Beside the model's own row of blocks, `rows` of some of them run: a stage's. All
    ranks must call. Raises `UserError` when the experts cannot be divided evenly.
    """
    product = products(groups, options, MatrixProduct(groups.step))
    replaced: dict[str, Callable[[Any], Any]] = {
        "product": lambda projection: product(*projection.dims),
        "norms": lambda norm: norms_of(groups, norm.dim),
        "all_rows": always(row_gathering(groups, options)),
        "sequence": always(sequence_split(groups, options)),
        "tokens": always(token_split(groups, options)),
        "dispatch": lambda layer: dispatch_of(groups, options, layer.expert_count),
        "vocabulary": always(vocabulary_split(groups, options, model.config.vocab)),
        "gradients": always({} if gradients is None else gradients),
        "step": always(groups.step),
    }
    runner = Recompute(options.recomputation, groups.step, unit, keep_collectives=options.keep_collectives)
    replace_all(model, replaced)
    runner.arrange([model.blocks, *rows], units_of(model))
    return model


def always(value: T) -> Callable[[object], T]:
    """What makes the same for all."""
    return lambda _: value
