"""Stage 5, output reduction (Algorithm 1 of the Optimus paper, lines 81-96), and sums in the experts' backward pass
(lines 98-113).

Legend: T tokens, K experts per token, P routed rows, H hidden, C partial sums of a routing weight's gradient.
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 4, 512  # numbers of tokens and columns of one program's output
_CHOICES = 256  # routing weights per program of `_sum_parts`


def expert_reduce(y_PH: Tensor, weights_TK: Tensor | None, position_TK: Tensor) -> Tensor:
    """Returns for each token the sum over k of weights[t, k] * y[position[t, k]]; [T, H] in y's dtype.

    Skips positions of -1. Without `weights_TK`, all weights are 1.
    """
    (T, K), H = position_TK.shape, y_PH.shape[1]
    out_TH = y_PH.new_empty(T, H)
    columns = min(_COLUMNS, triton.next_power_of_2(H))
    _reduce[(max(1, triton.cdiv(T, _ROWS)), triton.cdiv(H, columns))](
        y_PH, y_PH if weights_TK is None else weights_TK, position_TK, out_TH, T, H=H, K=K,
        WEIGHTED=weights_TK is not None, ROWS=_ROWS, COLUMNS=columns,
    )  # fmt: skip
    return out_TH


def expert_reduce_backward(weight_grad_PC: Tensor, weights_TK: Tensor, position_TK: Tensor) -> Tensor:
    """Returns the gradient of `weights_TK`, in the dtype of `weights_TK`.

    A weight's gradient is the sum over C of the row at the weight's position, or 0 for the position -1.
    """
    choices = weights_TK.numel()
    programs = max(1, triton.cdiv(choices, _CHOICES))
    # The length is a multiple of `_CHOICES`: the store has no mask.
    sums = weights_TK.new_empty(programs * _CHOICES)
    _sum_parts[(programs,)](weight_grad_PC, position_TK, sums, choices, C=weight_grad_PC.shape[1], CHOICES=_CHOICES)
    return sums[:choices].view(weights_TK.shape)


@triton.jit(do_not_specialize=["T"])
def _reduce(
    y_PH, weights_TK, position_TK, out_TH, T, H: tl.constexpr, K: tl.constexpr,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(K):
        position = tl.load(position_TK + t * K + k, mask=t < T, other=-1)
        here = position >= 0
        y = tl.load(
            y_PH + position.to(tl.int64)[:, None] * H + h[None, :], mask=here[:, None] & (h < H)[None, :], other=0
        ).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weights_TK + t * K + k, mask=here, other=0).to(tl.float32)[:, None]
        sums += y
    out_at = out_TH + t[:, None] * H + h[None, :]
    tl.store(out_at, sums.to(out_TH.dtype.element_ty), mask=(t < T)[:, None] & (h < H)[None, :])


@triton.jit(do_not_specialize=["choices"])
def _sum_parts(part_PC, position_TK, out, choices, C: tl.constexpr, CHOICES: tl.constexpr):
    choice = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    position = tl.load(position_TK + choice, mask=choice < choices, other=-1)
    here = position >= 0
    sums = tl.zeros((CHOICES,), dtype=tl.float32)
    for c in range(C):
        sums += tl.load(part_PC + position.to(tl.int64) * C + c, mask=here, other=0)
    tl.store(out + choice, sums.to(out.dtype.element_ty))
