"""A model's modules, made with the parts that its place on the mesh asks for: one sequence, in which order does not matter.

What a rank holds of each parameter is another question (`layouts.py`): the modules are made as one device has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import nn

from optimus.comm import Group, Groups
from optimus.comm.functional import all_gather_rows, copy_to_group
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct
from optimus.model import Transformer
from optimus.model.moe.dispatch import Dispatch, local_dispatch
from optimus.model.moe.router import Routing
from optimus.model.moe.tokens import LocalTokens, TokenSplit
from optimus.model.norms import LocalNorms, Norms
from optimus.model.parameters import Dim
from optimus.model.parts import LOCAL, LocalProduct, Parts, Product, run_unit
from optimus.model.sequence import LocalSequence, SequenceSplit
from optimus.model.vocabulary import LocalVocabulary, Vocabulary
from optimus.parallel.context import RingSequence, UlyssesSequence
from optimus.parallel.dispatch import AllGatherDispatch, AllToAllDispatch, TwoLevelDispatch
from optimus.parallel.layouts import RULES
from optimus.parallel.norms import SplitNorms
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.parallel.tensor import SplitProduct
from optimus.parallel.tokens import SplitTokens
from optimus.parallel.vocabulary import SplitVocabulary, tokens_along


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


def build_stage(
    architecture: ModelConfig,
    groups: Groups,
    options: StageOptions,
    gradient_buffers: Mapping[nn.Parameter, GradientBuffer] = LOCAL.gradient_buffers,
    unit: Callable[..., Any] = run_unit,
) -> Transformer:
    """The model, every parameter whole and empty on the default device, of modules that work on this rank's parts of them.

    `unit` runs a unit, whose parameters need not be here before (`Runner`). All ranks must call. Raises `UserError` when the
    experts cannot be divided evenly.
    """
    return Transformer(architecture, options.routing, parts_of(architecture, groups, options, gradient_buffers, unit))


def parts_of(
    architecture: ModelConfig,
    groups: Groups,
    options: StageOptions,
    gradient_buffers: Mapping[nn.Parameter, GradientBuffer] = LOCAL.gradient_buffers,
    unit: Callable[..., Any] = run_unit,
) -> Parts:
    """The parts of `build_stage`."""

    def norms(columns: Dim) -> Norms:
        group = _along(groups, columns)
        return SplitNorms(group) if group.size > 1 else LocalNorms()

    return Parts(
        product=products(groups, options, MatrixProduct(groups.step)),
        norms=norms,
        vocabulary=_vocabulary(architecture, groups, options),
        sequence=_sequence(groups, options),
        tokens=_tokens(groups, options),
        dispatch=partial(_dispatch, groups, options),
        all_rows=partial(all_gather_rows if options.sequence else copy_to_group, group=groups.along("tp_out")),
        gradient_buffers=gradient_buffers,
        runner=Recompute(options.recomputation, groups.step, unit, keep_collectives=options.keep_collectives),
        step=groups.step,
    )


def products(groups: Groups, options: StageOptions, inner: MatrixProduct) -> Callable[[Dim, Dim], Product]:
    """How a weight with these dims (outputs, inputs) multiplies: by `inner`, and the communication that its splits need."""
    local = LocalProduct(inner)

    def product(outputs: Dim, inputs: Dim) -> Product:
        over = _along(groups, inputs), _along(groups, outputs)
        if over[0].size * over[1].size == 1:
            return local
        # Where the residual stream is on the other side, its rows are split.
        gathers, scatters = (options.sequence and RULES.get(dim) == "tp_out" for dim in (outputs, inputs))
        return SplitProduct(inner, *over, gathers=gathers, scatters=scatters, overlap=options.overlap)

    return product


def _along(groups: Groups, dim: Dim) -> Group:
    """The ranks that a dim is split over."""
    return groups.along(*([RULES[dim]] if dim in RULES else []))


def _vocabulary(architecture: ModelConfig, groups: Groups, options: StageOptions) -> Vocabulary:
    axes = ("pp", "tp_out") if options.vocabulary else ("tp_out",)
    everyone, rows, columns = groups.along(*axes), groups.along("tp_out"), groups.along("tp_in")
    if everyone.size * columns.size == 1:
        return LocalVocabulary(groups.step)
    tokens = tokens_along(groups, architecture.vocab, *axes)
    return SplitVocabulary(rows, columns, tokens, options.sequence, everyone, groups.step)


def _sequence(groups: Groups, options: StageOptions) -> SequenceSplit:
    group = groups.along("cp")
    if group.size == 1:
        return LocalSequence()
    return RingSequence(group) if options.context_method == "ring" else UlyssesSequence(group)


def _tokens(groups: Groups, options: StageOptions) -> TokenSplit:
    rows, columns, parts = (groups.along(axis) for axis in ("tp_out", "tp_in", "cp"))
    if rows.size * columns.size * parts.size == 1:
        return LocalTokens()
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
