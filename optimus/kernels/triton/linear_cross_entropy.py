"""Output layer and cross-entropy, a block of rows at a time; see `kernels.linear_cross_entropy` for the method.

Legend: T rows (tokens), H hidden, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from optimus.kernels.matmul import matmul

_BLOCK_ELEMENTS = 1 << 27  # maximum number of logits of one block, unless one row has more; 256 MiB in bf16
_COLUMNS = 4096  # maximum number of columns that a program reads per step


def in_blocks(
    x_TH: Tensor,
    w_VH: Tensor,
    gradients: tuple[Tensor | None, Tensor | None] | None,
    target_T: Tensor,
    count: float,
    cap: float | None,
    rows_T: Tensor | None,
    seed: float = 1.0,
) -> Tensor:
    """Returns the loss of `kernels.linear_cross_entropy`.

    Fills `gradients[0]` with `seed` times the gradient of x, and adds `seed` times the gradient of w to `gradients[1]`.
    Skips a gradient that is None.
    """
    V = len(w_VH)
    block = max(1, _BLOCK_ELEMENTS // V)
    target_T = target_T.contiguous()
    fits = rows_T is not None and rows_T.dtype == torch.float32 and rows_T.is_contiguous()
    loss_T = rows_T if rows_T is not None and fits else x_TH.new_empty(len(x_TH), dtype=torch.float32)
    scale = seed / count if count else math.inf
    for start in range(0, len(x_TH), block):
        rows = slice(start, start + block)
        logits = F.linear(x_TH[rows], w_VH)
        _softmax_gradient[(len(logits),)](
            logits, target_T[rows], loss_T[rows], scale, V=V, CAP=cap or 0.0, WITH_GRADIENT=gradients is not None,
            COLUMNS=min(_COLUMNS, triton.next_power_of_2(V)),
        )  # fmt: skip
        if gradients is not None:
            if gradients[0] is not None:
                torch.mm(logits, w_VH, out=gradients[0][rows])
            if gradients[1] is not None:
                matmul(logits.T, x_TH[rows], out=gradients[1], add=True)
    if rows_T is not None and not fits:
        rows_T.copy_(loss_T)
    return loss_T.sum() / count


@triton.jit
def _tanh_capped(logits, CAP: tl.constexpr):
    logits = logits.to(tl.float32)
    if CAP > 0:
        logits = CAP * (2 * tl.sigmoid(logits * (2 / CAP)) - 1)
    return logits


@triton.jit
def _softmax_gradient(
    logits_TV, target_T, loss_T, scale,
    V: tl.constexpr, CAP: tl.constexpr, WITH_GRADIENT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores a row's loss; if `WITH_GRADIENT`, replaces the row's logits by `scale` times the loss's gradient."""
    t = tl.program_id(0)
    row = logits_TV + t.to(tl.int64) * V
    # The first loop's barriers make all threads load the target's logit before any thread overwrites logits.
    target = tl.load(target_T + t)
    counted = target >= 0
    target_logit = _tanh_capped(tl.load(row + target, mask=counted, other=0), CAP)
    largest = tl.full((), -float("inf"), dtype=tl.float32)
    total = tl.full((), 0.0, dtype=tl.float32)
    for first in range(0, V, COLUMNS):
        v = first + tl.arange(0, COLUMNS)
        logits = tl.where(v < V, _tanh_capped(tl.load(row + v, mask=v < V, other=0), CAP), -float("inf"))
        larger = tl.maximum(largest, tl.max(logits, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logits - larger), axis=0)
        largest = larger
    # The loss comes from the logits: an unlikely target's probability may underflow in fp32.
    loss = largest - target_logit + tl.log(total)
    tl.store(loss_T + t, tl.where(counted, loss, 0.0))
    scale = tl.where(counted, scale, 0.0)
    if WITH_GRADIENT:
        for first in range(0, V, COLUMNS):
            v = first + tl.arange(0, COLUMNS)
            logits = _tanh_capped(tl.load(row + v, mask=v < V, other=0), CAP)
            grad = (tl.exp(logits - largest) / total - tl.where(v == target, 1.0, 0.0)) * scale
            if CAP > 0:
                grad *= 1 - (logits / CAP) * (logits / CAP)
            tl.store(row + v, grad.to(logits_TV.dtype.element_ty), mask=v < V)
