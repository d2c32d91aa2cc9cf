"""The router after its projection: softmax, choice of experts and the sums for the router losses.

The forward kernel implements lines 8-9 (in stage 1) of Algorithm 1 in the Optimus paper.

Legend: T tokens, E experts, K experts per token, B blocks of tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus.autograd import once_differentiable

_BLOCK_ELEMENTS = 2048  # maximum number of logits per program, unless one token has more


class Routed(NamedTuple):
    """The router's choices, and sums over the tokens."""

    weights_TK: Tensor  # in the logits' dtype
    indices_TK: Tensor  # int64
    counts_E: Tensor  # number of tokens that chose each expert; fp32, no gradient
    probabilities_E: Tensor  # probabilities summed over tokens; fp32
    z: Tensor  # squared log-sum-exp, summed over tokens; fp32 scalar


def router(
    logits_TE: Tensor, experts_per_token: int, *, forced_T: Tensor | None = None, renormalise: bool = False
) -> Routed:
    """Computes a softmax over E in fp32 and chooses the experts with the K largest probabilities.

    A token with f in `forced_T` gets the experts (f*K + k) modulo E for k < K instead. `renormalise` makes a token's
    weights sum to 1. Gradients flow from weights, probabilities and z to the logits.
    """
    return Routed(*_Router.apply(logits_TE, experts_per_token, forced_T, renormalise))


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, K: int, forced_T: Tensor | None, renormalise: bool) -> tuple[Tensor, ...]:
        logits_TE = logits_TE.contiguous()
        T, E = logits_TE.shape
        tokens, blocks = _blocks(T, E)
        weights_TK = logits_TE.new_empty(T, K)
        indices_TK = logits_TE.new_empty(T, K, dtype=torch.int64)
        counts_BE, probabilities_BE = (logits_TE.new_empty(blocks, E, dtype=torch.float32) for _ in range(2))
        z_B = logits_TE.new_empty(blocks, dtype=torch.float32)
        _route[(blocks,)](
            logits_TE, forced_T, weights_TK, indices_TK, counts_BE, probabilities_BE, z_B, T, E=E, K=K,
            FORCED=forced_T is not None, RENORMALISE=renormalise, TOKENS=tokens, EXPERTS=triton.next_power_of_2(E),
            CHOICES=triton.next_power_of_2(K),
        )  # fmt: skip
        ctx.save_for_backward(logits_TE, indices_TK)
        ctx.renormalise = renormalise
        counts_E = counts_BE.sum(0)
        ctx.mark_non_differentiable(indices_TK, counts_E)
        return weights_TK, indices_TK, counts_E, probabilities_BE.sum(0), z_B.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TE, indices_TK = ctx.saved_tensors
        weights_grad_TK, _, _, probabilities_grad_E, z_grad = grads
        (T, E), K = logits_TE.shape, indices_TK.shape[1]
        tokens, blocks = _blocks(T, E)
        logits_grad_TE = torch.empty_like(logits_TE)
        _route_backward[(blocks,)](
            logits_TE, indices_TK, weights_grad_TK.contiguous(), probabilities_grad_E.contiguous(), z_grad,
            logits_grad_TE, T, E=E, K=K, RENORMALISE=ctx.renormalise, TOKENS=tokens, EXPERTS=triton.next_power_of_2(E),
        )  # fmt: skip
        return logits_grad_TE, None, None, None


def _blocks(T: int, E: int) -> tuple[int, int]:
    tokens = max(1, min(64, _BLOCK_ELEMENTS // triton.next_power_of_2(E)))
    return tokens, max(1, triton.cdiv(T, tokens))


@triton.jit
def _softmax(logits_TE, t, T, E: tl.constexpr, EXPERTS: tl.constexpr):
    """Returns (probabilities [TOKENS, EXPERTS], log-sum-exp [TOKENS], logits [TOKENS, EXPERTS]) in fp32.

    TOKENS is the number of tokens per program, and EXPERTS is E rounded up to a power of 2. Padding is 0.
    """
    e = tl.arange(0, EXPERTS)
    real = (t < T)[:, None] & (e < E)[None, :]
    at = logits_TE + t.to(tl.int64)[:, None] * E + e[None, :]
    logits = tl.load(at, mask=real, other=-float("inf")).to(tl.float32)
    largest = tl.where(t < T, tl.max(logits, axis=1), 0.0)
    p = tl.exp(logits - largest[:, None])
    total = tl.where(t < T, tl.sum(p, axis=1), 1.0)
    return p / total[:, None], largest + tl.log(total), tl.where(real, logits, 0.0)


@triton.jit(do_not_specialize=["T"])
def _route(
    logits_TE, forced_T, weights_TK, indices_TK, counts_BE, probabilities_BE, z_B, T, E: tl.constexpr,
    K: tl.constexpr, FORCED: tl.constexpr, RENORMALISE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    t = block * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    p, lse, logits = _softmax(logits_TE, t, T, E, EXPERTS)
    # Renormalised weights are a softmax of the chosen logits: the chosen probabilities may underflow in fp32.
    weighed = logits if RENORMALISE else p
    # NaN counts as 0 here: comparisons with NaN are false, and threads could find different maxima. -1 marks experts
    # that are already chosen or do not exist.
    candidates = tl.where((e < E)[None, :], tl.where(p == p, p, 0.0), -1.0)
    hits = tl.zeros((TOKENS, EXPERTS), dtype=tl.int32)
    j = tl.arange(0, CHOICES)[None, :]
    weights = tl.zeros((TOKENS, CHOICES), dtype=tl.float32)
    experts = tl.zeros((TOKENS, CHOICES), dtype=tl.int32)
    if FORCED:
        forced = tl.load(forced_T + t, mask=t < T, other=0)
    for k in range(K):
        expert = (forced * K + k) % E if FORCED else tl.argmax(candidates, axis=1, tie_break_left=True)
        expert = expert.to(tl.int32)
        hit = expert[:, None] == e[None, :]
        candidates = tl.where(hit, -1.0, candidates)
        hits += hit.to(tl.int32)
        weights += tl.where(j == k, tl.sum(tl.where(hit, weighed, 0.0), axis=1)[:, None], 0.0)
        experts += tl.where(j == k, expert[:, None], 0)
    if RENORMALISE:
        weights = tl.where(j < K, weights, -float("inf"))
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
        weights /= tl.sum(weights, axis=1)[:, None]
    at = t.to(tl.int64)[:, None] * K + j
    real = (t < T)[:, None] & (j < K)
    tl.store(weights_TK + at, weights.to(weights_TK.dtype.element_ty), mask=real)
    tl.store(indices_TK + at, experts.to(tl.int64), mask=real)
    counts = tl.sum(tl.where((t < T)[:, None], hits, 0), axis=0)
    tl.store(counts_BE + block * E + e, counts.to(tl.float32), mask=e < E)
    tl.store(probabilities_BE + block * E + e, tl.sum(p, axis=0), mask=e < E)
    tl.store(z_B + block, tl.sum(lse * lse, axis=0))


@triton.jit(do_not_specialize=["T"])
def _route_backward(
    logits_TE, indices_TK, weights_grad_TK, probabilities_grad_E, z_grad, logits_grad_TE, T,
    E: tl.constexpr, K: tl.constexpr, RENORMALISE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    p, lse, logits = _softmax(logits_TE, t, T, E, EXPERTS)
    p_grad = tl.load(probabilities_grad_E + e, mask=e < E, other=0)[None, :] + tl.zeros_like(p)
    direct = tl.zeros_like(p)  # the logits' gradient through renormalised weights
    if RENORMALISE:  # w = softmax(chosen logits); for the gradient g of w, the logits' gradient is w * (g - sum(g * w))
        chosen = tl.zeros_like(p)
        given = tl.zeros_like(p)
        for k in range(K):
            at = t.to(tl.int64) * K + k
            hit = tl.load(indices_TK + at, mask=t < T, other=0)[:, None] == e[None, :]
            chosen = tl.where(hit, 1.0, chosen)
            given += tl.where(hit, tl.load(weights_grad_TK + at, mask=t < T, other=0).to(tl.float32)[:, None], 0.0)
        w = tl.where(chosen > 0, logits, -float("inf"))
        w = tl.exp(w - tl.max(w, axis=1)[:, None])
        w /= tl.sum(w, axis=1)[:, None]
        direct = w * (given - tl.sum(given * w, axis=1)[:, None])
    else:
        for k in range(K):
            at = t.to(tl.int64) * K + k
            expert = tl.load(indices_TK + at, mask=t < T, other=0)
            grad = tl.load(weights_grad_TK + at, mask=t < T, other=0).to(tl.float32)
            p_grad += tl.where(expert[:, None] == e[None, :], grad[:, None], 0.0)
    through_z = 2 * tl.load(z_grad) * lse
    grad = p * (p_grad - tl.sum(p * p_grad, axis=1)[:, None] + through_z[:, None]) + direct
    at = logits_grad_TE + t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(at, grad.to(logits_grad_TE.dtype.element_ty), mask=(t < T)[:, None] & (e < E)[None, :])
