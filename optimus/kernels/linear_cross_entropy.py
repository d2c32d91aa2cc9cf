"""Output layer and cross-entropy in one operation, a block of rows at a time.

With gradients enabled, the forward pass also computes the gradients.

Legend: T rows (tokens), H hidden, V rows of the weight on this device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels import backend
from optimus.kernels.backend import compute_dtype
from optimus.kernels.matmul import matmul
from optimus.step_context import Forms

Gradients = tuple[Tensor | None, Tensor | None]  # gradients of x and w; None for a gradient that autograd does not need

_BLOCK_ELEMENTS = 1 << 21  # maximum number of logits in one block, unless `_LEAST_ROWS` rows have more; 8 MiB in fp32
_LEAST_ROWS = 512  # minimum number of rows of a block, except the last block


class VocabularyPart(Protocol):
    """This device's shard of the vocabulary, and the communication with the other shards."""

    first: int  # vocabulary entry of this shard's first row
    largest: int  # number of rows of the largest shard

    def complete(self, logits_TV: Tensor) -> None:
        """All-reduces the logits in place over the devices that have the same rows of the weight, but other columns."""

    def gather(self, logits_TV: Tensor) -> Tensor:
        """All-gathers the logits of all shards of the vocabulary."""

    def combine(self, lse_T: Tensor, chosen_T: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (log-sum-exp of `lse_T`, sum of `chosen_T`) over all shards of the vocabulary."""


def linear_cross_entropy(
    x_TH: Tensor,
    w_VH: Tensor,
    target_T: Tensor,
    count: float | None = None,
    part: VocabularyPart | None = None,
    forms: Forms | None = None,
    cap: float | None = None,
    rows_T: Tensor | None = None,
    seed: float = 1.0,
) -> Tensor:
    """Returns the summed cross-entropy of `x_TH @ w_VH.T` against `target_T`, divided by `count`, as a scalar.

    By default `count` is T. The function ignores rows with a negative target. The loss is in fp32 (float64 for
    float64). With a `part`, the loss is over the whole vocabulary, and the gradient of x is this shard's contribution.
    With a `cap`, the logits are `soft_capped`. `rows_T`, if given, receives the cross-entropy of each row, 0 for
    ignored rows. `seed` is the expected gradient of the result, by which the gradients that the forward pass computes are
    multiplied: in float16, smaller ones would underflow.
    """
    count = float(len(x_TH)) if count is None else count
    given: dict[str, Any] = {"target_T": target_T, "count": count, "cap": cap, "rows_T": rows_T, "seed": seed}
    find = partial(_in_blocks, part=part, forms=forms, **given)
    if part is None and backend.use_triton(x_TH):
        from optimus.kernels.triton import linear_cross_entropy as kernels

        find = partial(kernels.in_blocks, **given)
    return LinearLoss.apply(x_TH, w_VH, find, torch.is_grad_enabled(), seed)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(logits / cap) in the logits' dtype (Gemma 2, section 2), or the logits if there is no
    `cap`."""
    if cap is None:
        return logits
    return (logits.to(compute_dtype(logits.dtype)) / cap).tanh().mul(cap).to(logits.dtype)


def linear_cross_entropy_reference(
    x_TH: Tensor, w_VH: Tensor, target_T: Tensor, count: float | None = None, cap: float | None = None
) -> Tensor:
    """Reference implementation for tests; ignores rows with a target of -1."""
    logits_TV = soft_capped(F.linear(x_TH, w_VH).to(compute_dtype(x_TH.dtype)), cap)
    total = F.cross_entropy(logits_TV, target_T, ignore_index=-1, reduction="sum")
    return total / (len(x_TH) if count is None else count)


def block_rows(vocab: int) -> int:
    """Returns the number of tokens of a block, for a weight of `vocab` rows."""
    return max(_LEAST_ROWS, _BLOCK_ELEMENTS // vocab)


class LinearLoss(torch.autograd.Function):
    """Differentiable loss of x and w, which `find(x, w, gradients)` returns.

    Unless `gradients` is None, `find` also writes `seed` times the gradient of x to `gradients[0]`, and adds `seed` times
    the gradient of w to `gradients[1]`, which is zeros in fp32 (float64 if x is float64). `find` skips a gradient that is
    None.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, w_VH: Tensor, find: Callable[..., Tensor], with_gradients: bool, seed: float
    ) -> Tensor:
        ctx.seed = seed
        if not with_gradients:
            return find(x_TH, w_VH, None)
        wanted_x, wanted_w = ctx.needs_input_grad[:2]
        x_grad_TH = torch.empty_like(x_TH) if wanted_x else None
        w_grad_VH = torch.zeros_like(w_VH, dtype=compute_dtype(x_TH.dtype)) if wanted_w else None
        gradients = x_grad_TH, w_grad_VH
        loss = find(x_TH, w_VH, gradients)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_grad, w_grad = ctx.saved_tensors
        scale = grads[0] / ctx.seed
        x_grad = None if x_grad is None else backend.scaled(x_grad, scale)
        return x_grad, None if w_grad is None else w_grad * scale, None, None, None


def _in_blocks(
    x_TH: Tensor, w_VH: Tensor, gradients: Gradients | None, target_T: Tensor, count: float,
    part: VocabularyPart | None, forms: Forms | None, cap: float | None, rows_T: Tensor | None, seed: float,
) -> Tensor:  # fmt: skip
    wide = compute_dtype(x_TH.dtype)
    # Shards communicate in every block: all shards need the same blocks.
    block = block_rows(len(w_VH) if part is None else part.largest)
    total = torch.zeros((), dtype=wide, device=x_TH.device)
    # All blocks reuse this memory: new memory could cause page faults.
    logits_scratch = x_TH.new_empty(min(block, len(x_TH)), len(w_VH))
    p_scratch = torch.empty_like(logits_scratch, dtype=wide)
    for start in range(0, len(x_TH), block):
        x, target = x_TH[start : start + block], target_T[start : start + block]
        logits, p = logits_scratch[: len(x)], p_scratch[: len(x)]
        matmul(x, w_VH.T, out=logits, forms=forms)
        losses = _softmax_gradient(logits, target, p, part, cap)
        total += losses.sum()
        if rows_T is not None:
            rows_T[start : start + block] = losses
        if gradients is not None:
            if logits.dtype == wide:
                torch.div(p, count / seed, out=logits)
            else:
                logits.copy_(p.div_(count / seed))
            if gradients[0] is not None:
                matmul(logits, w_VH, out=gradients[0][start : start + block], forms=forms)
            if gradients[1] is not None:
                matmul(logits.T, x, out=gradients[1], add=True, forms=forms)
    return total / count


def _softmax_gradient(
    logits_TV: Tensor, target_T: Tensor, out_TV: Tensor, part: VocabularyPart | None, cap: float | None
) -> Tensor:
    """Returns the losses [T], and writes the gradient of the losses' sum with respect to the logits to `out_TV`."""
    if part is not None:
        part.complete(logits_TV)
    if cap is not None:
        logits_TV = soft_capped(logits_TV.to(out_TV.dtype), cap)
    softmax = partial_softmax(logits_TV, target_T, 0 if part is None else part.first, out_TV)
    lse_T, chosen_T = softmax.lse_T, softmax.chosen_T
    if part is not None:
        lse_T, chosen_T = part.combine(lse_T, chosen_T)
    complete_softmax(softmax, lse_T)
    if cap is not None:
        out_TV *= 1 - (logits_TV / cap).square_()
    return (lse_T - chosen_T) * (target_T >= 0)


class PartialSoftmax(NamedTuple):
    """Softmax over a shard of the vocabulary."""

    p_TV: Tensor
    lse_T: Tensor
    chosen_T: Tensor  # the target's logit; 0 if this shard does not have the target
    target_T: Tensor
    first: int  # the vocabulary entry of the first column


def partial_softmax(logits_TV: Tensor, target_T: Tensor, first: int, out_TV: Tensor) -> PartialSoftmax:
    """Writes the softmax over a shard of the vocabulary to `out_TV`. `first` is the shard's first vocabulary entry."""
    row_T = target_T - first
    here_T = (row_T >= 0) & (row_T < logits_TV.shape[1])
    row_T1 = row_T.clamp(0, logits_TV.shape[1] - 1)[:, None]
    wide = out_TV.dtype
    p_TV = torch.softmax(logits_TV if logits_TV.dtype == wide else out_TV.copy_(logits_TV), -1, out=out_TV)
    # The largest probability cannot underflow; the target's probability can.
    lse_T = logits_TV.amax(-1).to(wide) - p_TV.amax(-1).log()  # both maxima are of the same column
    chosen_T = logits_TV.gather(1, row_T1)[:, 0].to(wide).masked_fill(~here_T, 0)
    return PartialSoftmax(p_TV, lse_T, chosen_T, target_T, first)


def complete_softmax(part: PartialSoftmax, lse_T: Tensor) -> Tensor:
    """Replaces `p_TV` by the gradient [T, V] of the losses' sum with respect to the logits.

    `lse_T` is the log-sum-exp over the whole vocabulary. The gradient is 0 in rows with a negative target.
    """
    p_TV, own_T, _, target_T, first = part
    if lse_T is not own_T:
        p_TV *= (own_T - lse_T).exp_()[:, None]
    row_T = target_T - first
    here_T = (row_T >= 0) & (row_T < p_TV.shape[1])
    p_TV.scatter_add_(1, row_T.clamp(0, p_TV.shape[1] - 1)[:, None], -here_T[:, None].to(p_TV.dtype))
    counted_T = target_T >= 0
    if p_TV.device.type != "cpu" or not counted_T.all():  # on an accelerator, the test would make the host wait
        p_TV *= counted_T[:, None]
    return p_TV
