"""Output layer and any per-token loss in one operation, a block of rows at a time; see `linear_cross_entropy`.

Legend: T rows (tokens), H hidden, V rows of the weight on this device (the whole vocabulary for the input of a loss).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from optimus.errors import UserError, said
from optimus.kernels.backend import compute_dtype
from optimus.kernels.linear_cross_entropy import Gradients, LinearLoss, VocabularyPart, block_rows, soft_capped
from optimus.kernels.matmul import matmul
from optimus.step_context import Forms

TokenLossFunction = Callable[[Tensor, Tensor], Tensor]  # maps logits [T, V] and targets [T] to losses [T]


def linear_token_loss(
    x_TH: Tensor, w_VH: Tensor, target_T: Tensor, count: float, loss: TokenLossFunction,
    part: VocabularyPart | None = None, forms: Forms | None = None, cap: float | None = None,
    rows_T: Tensor | None = None, seed: float = 1.0,
) -> Tensor:  # fmt: skip
    """Returns the sum of `loss` over rows, divided by `count`, as a scalar; see `linear_cross_entropy` for the
    arguments.

    `loss` receives the logits in fp32 (float64 if `x_TH` is float64), converted from the dtype of `x_TH`. `loss` sees
    target 0 in ignored rows. Raises `UserError` if `loss` raises an exception or does not return one floating-point
    number for each row. With gradients enabled, also raises `UserError` if the losses do not depend on the logits.
    """
    find = partial(
        _in_blocks, target_T=target_T, count=count, loss=loss, part=part, forms=forms, cap=cap, rows_T=rows_T, seed=seed
    )
    return LinearLoss.apply(x_TH, w_VH, find, torch.is_grad_enabled(), seed)


def _in_blocks(
    x_TH: Tensor, w_VH: Tensor, gradients: Gradients | None, target_T: Tensor, count: float, loss: TokenLossFunction,
    part: VocabularyPart | None, forms: Forms | None, cap: float | None, rows_T: Tensor | None, seed: float,
) -> Tensor:  # fmt: skip
    wide, first = compute_dtype(x_TH.dtype), 0 if part is None else part.first
    block = block_rows(len(w_VH) if part is None else part.largest)  # all shards need the same blocks
    total = torch.zeros((), dtype=wide, device=x_TH.device)
    for start in range(0, len(x_TH), block):
        rows = slice(start, start + block)
        x, target = x_TH[rows], target_T[rows]
        logits = matmul(x, w_VH.T, forms=forms)
        if part is not None:
            part.complete(logits)
        own = soft_capped(logits.to(wide), cap)
        losses, gradient = _losses(own if part is None else part.gather(own), target, loss, gradients is not None)
        total += losses.sum()
        if rows_T is not None:
            rows_T[rows] = losses
        if gradients is None or gradient is None:
            continue
        p = gradient[:, first : first + len(w_VH)] / (count / seed)
        if cap is not None:
            p *= 1 - (own / cap).square_()
        narrow = p.to(x.dtype)
        if gradients[0] is not None:
            matmul(narrow, w_VH, out=gradients[0][rows], forms=forms)
        if gradients[1] is not None:
            matmul(narrow.T, x, out=gradients[1], add=True, forms=forms)
    return total / count


def _losses(
    logits_TV: Tensor, target_T: Tensor, loss: TokenLossFunction, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns (losses [T], gradient [T, V] of the summed losses). Both are 0 in ignored rows.

    Without `with_gradient`, the gradient is None.
    """
    with torch.set_grad_enabled(with_gradient):
        logits_TV = logits_TV.detach().requires_grad_(with_gradient)
        try:
            losses_T = loss(logits_TV, target_T.clamp(min=0))
        except (Exception, SystemExit) as error:
            raise UserError(f"train.loss: its function failed ({said(error)}): correct its code") from error
        if not isinstance(losses_T, Tensor) or losses_T.shape != target_T.shape or not losses_T.is_floating_point():
            found = f"the shape {[*losses_T.shape]}" if isinstance(losses_T, Tensor) else f"a {type(losses_T).__name__}"
            raise UserError(
                f"train.loss: its function returns {found} for {len(target_T)} tokens: return a tensor with one "
                "floating-point number for each token"
            )
        if with_gradient and not losses_T.requires_grad:
            raise UserError(
                "train.loss: the result of its function does not depend on the logits: compute it from them"
            )
        counted_T = target_T >= 0
        losses_T = torch.where(counted_T, losses_T, losses_T.new_zeros(()))
        gradient = None
        if with_gradient:
            (gradient,) = torch.autograd.grad(losses_T.sum(), logits_TV)
            # In ignored rows, autograd multiplies the derivative by 0. If the derivative is not finite, the product is
            # NaN.
            gradient = torch.where(counted_T[:, None], gradient, gradient.new_zeros(()))
    return losses_T.detach(), gradient
