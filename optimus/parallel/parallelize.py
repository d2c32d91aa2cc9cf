"""A model of one device becomes one of a mesh. `parallelize` is one sequence of lines, in which order does not matter; each
replaces how some modules do their part of the work. Names and parameters stay: what a rank holds of each is another question
(`layouts.py`).

What may be replaced, a class says itself (`replaceable`), so a module of a user's own is divided as ours are.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from optimus.comm import Group, Groups
from optimus.comm.functional import all_gather_rows, copy_to_group
from optimus.errors import UserError
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct
from optimus.model import Transformer
from optimus.model.linear import Product
from optimus.model.moe.choices import Routing
from optimus.model.moe.dispatch import Dispatch, local_dispatch
from optimus.model.moe.tokens import TokenSplit
from optimus.model.norms import Norms
from optimus.model.parameters import Dim
from optimus.model.sequence import SequenceSplit
from optimus.model.transformer import Blocks
from optimus.model.units import units_of
from optimus.model.vocabulary import Vocabulary
from optimus.parallel.context import RingSequence, UlyssesSequence
from optimus.parallel.dispatch import AllGatherDispatch, AllToAllDispatch, TwoLevelDispatch
from optimus.parallel.layouts import RULES
from optimus.parallel.norms import SplitNorms
from optimus.parallel.recompute import Recomputation, Recompute, run_unit
from optimus.parallel.tensor import SplitProduct
from optimus.parallel.tokens import SplitTokens
from optimus.parallel.vocabulary import SplitVocabulary, tokens_along

T = TypeVar("T")


@dataclass(frozen=True)
class StageOptions:
    """How a model is divided, beyond the sizes of the mesh, and what is recomputed.

    `sequence`: the rows of the residual stream are split over `tp_out`. `overlap`: communication of a projection goes on
    beside its products. `vocabulary`: all ranks of the pipeline have a part of it. `duplicates`: the ranks of a
    tensor-parallel grid send the same tokens to the experts.
    """

    routing: Routing = "learned"
    sequence: bool = False
    overlap: bool = True
    vocabulary: bool = False
    context_method: Literal["ring", "ulysses"] = "ring"
    duplicates: bool = False
    dispatch: Literal["alltoall", "allgather"] = "alltoall"
    recomputation: Recomputation = field(default_factory=Recomputation)
    keep_collectives: bool = True


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
    replace_all(model, "product", lambda projection: product(*projection.dims))
    replace_all(model, "norms", lambda norm: _norms(groups, norm.dim))
    replace_all(model, "all_rows", always(_all_rows(groups, options)))
    replace_all(model, "sequence", always(_sequence(groups, options)))
    replace_all(model, "tokens", always(_tokens(groups, options)))
    replace_all(model, "dispatch", lambda layer: _dispatch(groups, options, layer.expert_count))
    replace_all(model, "vocabulary", always(_vocabulary(groups, options, model.config.vocab)))
    replace_all(model, "gradients", always({} if gradients is None else gradients))
    replace_all(model, "step", always(groups.step))
    runner = Recompute(options.recomputation, groups.step, unit, keep_collectives=options.keep_collectives)
    runner.arrange([model.blocks, *rows], units_of(model))
    return model


def replace_all(model: nn.Module, what: str, make: Callable[[Any], Any]) -> None:
    """Give all modules of `model` that have `what` among what is `replaceable` the one that `make` makes for them."""
    for module in model.modules():
        if what in getattr(module, "replaceable", ()):
            setattr(module, what, make(module))


def always(value: T) -> Callable[[object], T]:
    """What makes the same for all."""
    return lambda _: value


def products(groups: Groups, options: StageOptions, inner: MatrixProduct) -> Callable[[Dim, Dim], Product]:
    """Tensor parallelism: how a weight with these dims (outputs, inputs) multiplies: by `inner`, and the communication that
    its splits need."""
    local = Product(inner)

    def product(outputs: Dim, inputs: Dim) -> Product:
        over = _along(groups, inputs), _along(groups, outputs)
        if over[0].size * over[1].size == 1:
            return local
        # Where the residual stream is on the other side, its rows are split.
        gathers, scatters = (options.sequence and RULES.get(dim) == "tp_out" for dim in (outputs, inputs))
        return SplitProduct(inner, *over, gathers=gathers, scatters=scatters, overlap=options.overlap)

    return product


def _norms(groups: Groups, columns: Dim) -> Norms:
    group = _along(groups, columns)
    return SplitNorms(group) if group.size > 1 else Norms()


def _along(groups: Groups, dim: Dim) -> Group:
    """The ranks that a dim is split over."""
    return groups.along(*([RULES[dim]] if dim in RULES else []))


def _all_rows(groups: Groups, options: StageOptions) -> Callable[[Tensor], Tensor]:
    return partial(all_gather_rows if options.sequence else copy_to_group, group=groups.along("tp_out"))


def _sequence(groups: Groups, options: StageOptions) -> SequenceSplit:
    group = groups.along("cp")
    if group.size == 1:
        return SequenceSplit()
    return RingSequence(group) if options.context_method == "ring" else UlyssesSequence(group)


def _tokens(groups: Groups, options: StageOptions) -> TokenSplit:
    rows, columns, parts = (groups.along(axis) for axis in ("tp_out", "tp_in", "cp"))
    if rows.size * columns.size * parts.size == 1:
        return TokenSplit()
    return SplitTokens(rows, columns, parts, sequence=options.sequence, duplicates=options.duplicates)


def _dispatch(groups: Groups, options: StageOptions, experts: int) -> Dispatch:
    ranks, parts = groups.along("ep"), groups.along("etp")
    if ranks.size * parts.size == 1:
        return local_dispatch
    each, rest = divmod(experts, ranks.size)
    if rest:
        raise UserError(
            f"{experts} experts cannot be divided over ep {ranks.size}: set parallel.expert to a divisor of "
            "model.experts"
        )
    if options.dispatch == "alltoall" and (levels := groups.levels("ep")) is not None:
        return TwoLevelDispatch(*levels, each, parts, duplicates=options.duplicates)
    if options.dispatch == "alltoall":
        return AllToAllDispatch(ranks, each, parts, duplicates=options.duplicates)
    return AllGatherDispatch(groups.along("ep", "etp"), ranks.rank * each, each)


def _vocabulary(groups: Groups, options: StageOptions, vocab: int) -> Vocabulary:
    axes = ("pp", "tp_out") if options.vocabulary else ("tp_out",)
    everyone, rows, columns = groups.along(*axes), groups.along("tp_out"), groups.along("tp_in")
    if everyone.size * columns.size == 1:
        return Vocabulary(groups.step)
    return SplitVocabulary(rows, columns, tokens_along(groups, vocab, *axes), options.sequence, everyone, groups.step)
