"""Bytes of activations, computed from shapes alone: what a forward pass keeps for its backward pass, and the most there are.

The peak is what is kept, and of the module whose backward pass is under way what it makes when it is run again and what its
operations hold for a moment: gradients of activations, and copies in fp32. That is found by walking through the modules
backwards, as each gives up what it has kept. The last is the output layer, which holds the gradient of its weight in fp32
and a block of logits. Gradients of parameters are held elsewhere (`state/`), but for those that are on their way there.

Experts are taken to get equally many tokens, or a multiple of the mean; each one's rows are padded as the CPU path does it.
Tokens are taken to choose experts at random, which says how many ranks a token goes to.

Legend, of this rank: T rows of its sequences, R rows of the residual stream and H columns, A columns of all its heads, C of
its heads of keys, I intermediate, U tokens that a sparse layer works on, K experts per token, e bytes per element, f bytes
where e is not enough.
"""

from collections.abc import Sequence
from math import comb
from typing import Literal, NamedTuple

from optimus.config import ModelConfig
from optimus.kernels.expert_mlp import PADDING
from optimus.kernels.linear_cross_entropy import block_rows
from optimus.parallel.recompute import Recomputation


class Split(NamedTuple):
    """How a model is divided, as far as activations know: sizes of mesh axes, and what moves tokens."""

    tp_out: int = 1
    tp_in: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence: bool = False
    duplicates: bool = False
    method: Literal["ring", "ulysses"] = "ring"
    dispatch: Literal["alltoall", "allgather"] = "alltoall"


class Activations(NamedTuple):
    """Bytes on one rank."""

    kept: int  # between the forward and the backward pass of one microbatch
    peak: int  # most at any time of the two


class _Module(NamedTuple):
    """Bytes of one module."""

    given: float  # its input, which it keeps whether it is run again or not
    inside: float  # what else it keeps, unless it is run again
    results: float  # of its collectives, kept if it is run again
    late: float  # of those, what is not asked for when it is run again alone: that ends where all inside is there
    work: float  # the most that its backward pass holds besides


class _Region(NamedTuple):
    """Bytes of what is run again together, or not at all."""

    kept: float
    modules: list[tuple[float, float]]  # of each what it makes when it is run again, and the most it holds besides


def activation_bytes(
    config: ModelConfig,
    chosen: Recomputation,
    *,
    micro_batch: int,
    context: int,
    itemsize: int,
    split: Split | None = None,
    keep_collectives: bool = True,
    layers: int | None = None,
    load: float = 1.0,
    first: bool = True,
    last: bool = True,
) -> Activations:
    """For one microbatch of `micro_batch` sequences of `context` tokens, in a type of `itemsize` bytes.

    `layers` are the blocks on this rank, by default all; `first` and `last` say whether it has the embedding and the output
    layer. Its experts have `load` times the mean number of tokens.
    """
    split = split or Split()
    sizes = _Sizes(config, micro_batch * context // split.cp, itemsize, split, load)
    blocks = _blocks(sizes, chosen, config.layers if layers is None else layers, keep_collectives)
    regions = [_embedding(sizes, context, first), *blocks, *([_alone(_norm(sizes)), _head(sizes)] if last else [])]
    kept = peak = sum(region.kept for region in regions)
    left = kept
    for region in reversed(regions):
        here = left + sum(again for again, _ in region.modules)
        for again, work in reversed(region.modules):
            peak = max(peak, here + work)
            here -= again
        left -= region.kept
    return Activations(round(kept), round(peak))


class _Sizes:
    """The sizes of the legend."""

    def __init__(self, config: ModelConfig, rows: int, itemsize: int, split: Split, load: float) -> None:
        self.config, self.split, self.load = config, split, load
        self.e, self.f = itemsize, max(4, itemsize)
        self.T = rows
        self.R = rows // split.tp_out if split.sequence else rows
        self.H = config.hidden // split.tp_in
        self.heads = config.heads // split.tp_out
        self.A, self.C = (heads * config.head_size // split.tp_out for heads in (config.heads, config.kv_heads))
        self.I = config.expert_intermediate // split.etp if config.experts else config.intermediate // split.tp_out
        self.stream = self.R * self.H * self.e  # the residual stream
        self.narrow = self.e < self.f  # whether norms and rotations make copies in fp32


def _blocks(s: _Sizes, chosen: Recomputation, layers: int, keep: bool) -> list[_Region]:
    feed_forward = "moe" if s.config.experts else "mlp"
    attention, dense = _attention(s), _experts(s) if s.config.experts else _mlp(s)
    modules = {"norm": _norm(s), "attention": attention, feed_forward: dense}
    names = ["norm", "attention", "norm", feed_forward]
    if "block" in chosen.kinds:
        whole = [modules[name] for name in names]
        lengths = [min(chosen.every, layers - start) for start in range(0, layers, chosen.every)]
        return [_run_again(whole * length, keep) for length in lengths]
    regions = []
    for number in range(1, layers + 1):
        kinds = chosen.kinds if number % chosen.every == 0 else ()
        for norm, module in (("norm", "attention"), ("norm", feed_forward)):
            if norm in kinds and module in kinds:
                regions.append(_run_again([modules[norm], modules[module]], keep))
            else:
                regions += [
                    _run_again([modules[name]], keep) if name in kinds else _alone(modules[name])
                    for name in (norm, module)
                ]
    return regions


def _alone(module: _Module) -> _Region:
    """A module that keeps what it needs."""
    return _Region(module.given + module.inside, [(0, module.work)])


def _run_again(modules: Sequence[_Module], keep: bool) -> _Region:
    """Modules one after the other, of which only the first one's input is kept, and the results of collectives."""
    results = sum(module.results for module in modules) if keep else 0.0
    again = [module.given + module.inside - (module.results if keep else 0) for module in modules]
    again[0] -= modules[0].given
    again[-1] += modules[-1].late if keep else 0  # other results are given again, and not kept any longer
    return _Region(modules[0].given + results, [(size, module.work) for size, module in zip(again, modules)])


def _norm(s: _Sizes) -> _Module:
    """The backward pass holds three wide copies and two gradients."""
    rms = s.config.norm == "rms"
    statistics = s.R * (s.f if rms else 2 * s.e)
    means = statistics if s.split.tp_in > 1 else 0
    wide = s.R * s.H * s.f * (3 if rms else 0)
    return _Module(s.stream, statistics, means, 0, wide + 2 * s.stream)


def _attention(s: _Sizes) -> _Module:
    """q, k and v in one tensor, q and k turned, the output and a number per head; with a norm of q and k also per row.

    Where heads share keys, q is a tensor of its own, which nobody keeps but a norm.
    """
    normed, q, k = s.config.qk_norm != "none", s.T * s.A * s.e, s.T * s.C * s.e
    apart = s.C < s.A and not normed
    numbers, wide = s.T * s.heads * s.f, s.T * s.A * s.f
    inside = 2 * q + 3 * k + (0 if apart else q) + numbers
    if normed:
        inside += 2 * s.T * s.f if s.config.qk_norm == "whole" else numbers + s.T * s.f * s.C // s.config.head_size
    results, late = _projection_results(s, s.A + 2 * s.C)
    if s.C < s.A and s.split.sequence and s.split.tp_out > 1 and s.split.tp_in == 1:  # both projections gather the rows
        results += s.T * s.H * s.e
    work = s.stream + max(2 * (q + k), q + (3 if normed else 2) * wide)  # then those of the norms or the turns
    if s.split.cp > 1 and s.split.method == "ring":
        results += q + numbers
        # Keys, values and gradients, coming and going, and a block's gradients.
        work += wide + 4 * s.T * s.C * s.f + 2 * q + 6 * k
    elif s.split.cp > 1:  # copies of q, k, v and the output, for other heads; the first ones are saved by norms alone
        inside += q + k if normed else q - k if apart else -q
        results += 2 * (q + k)
        work += q + 2 * k
    product = _product(s, s.A + 2 * s.C, s.H)
    last = 2 * s.stream - q - 2 * k + product  # the first projection's, when the rest is given up
    return _Module(s.stream, inside, results, late, max(work, last))


def _mlp(s: _Sizes) -> _Module:
    """Both halves of the projection, and the activation. The backward pass holds the gradients of both, and two copies."""
    inside = s.T * 3 * s.I * s.e
    results, late = _projection_results(s, 2 * s.I)
    work = s.stream + 4 * s.T * s.I * s.e
    last = 2 * s.stream - s.T * s.I * s.e + _product(s, 2 * s.I, s.H)
    return _Module(s.stream, inside, results, late, max(work, last))


def _product(s: _Sizes, rows: int, columns: int) -> float:
    """The gradient of a weight, where it is of another type than the gradients that it is added to."""
    return rows * columns * s.e if s.narrow else 0


def _projection_results(s: _Sizes, outputs: int) -> tuple[float, float]:
    """(results of the collectives of the projections from and to the residual stream, of those the latter's)."""
    back = s.stream if s.split.tp_out > 1 else 0
    if s.split.tp_in > 1:
        return s.T * outputs * s.e + back, back
    return (s.T * s.H * s.e if s.split.sequence and back else 0) + back, back


def _experts(s: _Sizes) -> _Module:
    """Router, tokens where their experts are, and what these keep."""
    config, split = s.config, s.split
    assert config.experts is not None
    assert config.experts_per_token is not None
    E, K, hidden = config.experts, config.experts_per_token, config.hidden
    U = s.T if split.duplicates else s.T // (split.tp_out * split.tp_in)
    moves = split.ep * split.etp > 1
    load = s.load if split.ep > 1 else 1.0  # of this rank; else of one of its experts only
    arrived, rows = _rows(split, U, E, K, load)
    choices = load * U * K * (1 if split.duplicates else split.etp)  # of this rank's experts
    padded = choices + E / split.ep * (PADDING - 1) / 2
    router = U * (2 * E * s.f + s.f + K * 8) + (U * K * s.f if config.renormalise else 0)
    taken = U * hidden * s.e if split.tp_in > 1 else 0
    moved = rows * (hidden + K) * s.e if moves else 0
    index = padded * (8 + s.e) + rows * K * (9 if moves else 8) + arrived * 16 + (U * 8 if arrived else 0)
    own = (0 if moves else U * K * s.e) + padded * 2 * s.I * s.e
    inside = router + taken - (s.stream if taken else 0) + moved + index + own  # what was taken is saved, not the input
    late = taken + ((arrived or U) * hidden * s.e if moves else 0)
    late += s.T * s.H * s.e if split.tp_out > 1 and not (split.sequence or split.duplicates) else 0
    results = taken + moved + (rows * K * 4 if moves else 0) + late
    if arrived and split.etp > 1:  # what the parts of an expert add up; and, unless it was the same, what they gathered
        results += arrived * hidden * s.e
        results += 0 if split.duplicates else arrived * ((hidden + K) * s.e + K * 4)
    scratch = s.load * padded * split.ep / E * (2 * hidden + 6 * s.I) * s.e + _product(s, 3 * s.I, hidden)
    numbers = padded * (8 + 3 * s.e) + 2 * U * E * s.f
    gradients = (padded + (2 * rows if moves else 0)) * hidden * s.e
    return _Module(s.stream, inside, results, late, 2 * s.stream + gradients + scratch + numbers)


def _rows(split: Split, tokens: int, experts: int, chosen: int, load: float) -> tuple[float, float]:
    """(rows of tokens that come by all-to-all, rows that this rank's experts work on), of `tokens` on each rank.

    By all-to-all a token goes once to every rank that has one of its experts.
    """
    if split.ep * split.etp == 1:
        return 0, tokens
    if split.dispatch == "allgather":
        return 0, tokens * split.ep * split.etp
    elsewhere = comb(experts - experts // split.ep, chosen) / comb(experts, chosen)
    arrived = load * tokens * split.ep * (1 - elsewhere)
    return arrived, arrived * (1 if split.duplicates else split.etp)


def _embedding(s: _Sizes, context: int, here: bool) -> _Region:
    """The tokens; and the rotary tables, which all blocks share. The gradient of the whole weight is one tensor."""
    config = s.config
    table = context // s.split.cp * config.head_size * 4
    gradient = -(-config.vocab // s.split.tp_out) * s.H * s.e if here else 0
    return _Region(s.T * 8 + table, [(0, gradient + s.stream)])


def _head(s: _Sizes) -> _Region:
    """The gradients of its input and, in fp32, of its weight, made in the forward pass."""
    V = -(-s.config.vocab // s.split.tp_out)
    rows = min(s.T, block_rows(V))
    x, weight = s.T * s.H * s.e, V * s.H
    whole = x if s.split.sequence and s.split.tp_out > 1 else 0
    logits = rows * (V * (s.e + s.f + (s.f if s.narrow else 0)) + 64) + s.stream + whole  # with the last, its input
    scaled = x + weight * (s.f + (s.e if s.narrow else 0))
    return _Region(x + weight * s.f, [(0, max(scaled, logits))])
