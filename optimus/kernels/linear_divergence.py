"""Output layer and divergence from a teacher in one operation, a block of rows at a time; see `linear_cross_entropy`.

Legend: T rows (tokens), H hidden, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.kernels.backend import compute_dtype
from optimus.kernels.linear_cross_entropy import Gradients, LinearLoss, block_rows, soft_capped
from optimus.kernels.matmul import matmul


class SoftTargets(NamedTuple):
    """A teacher's soft targets for the rows (tokens) of a student."""

    logits: Callable[[slice], Tensor]  # maps a slice of rows to the teacher's logits [rows, V]
    temperature: float  # divides both models' logits (Hinton et al. 2015, section 2)


def linear_divergence(
    x_TH: Tensor,
    w_VH: Tensor,
    soft: SoftTargets,
    target_T: Tensor,
    count: float,
    cap: float | None = None,
    seed: float = 1.0,
) -> Tensor:
    """Returns the sum over rows of KL(teacher || student), times the temperature squared, divided by `count`.

    The result is a scalar in fp32 (float64 for float64). With a `cap`, the student's logits are `soft_capped`. The
    function ignores rows with a negative target. For `seed`, see `linear_cross_entropy`.
    """
    find = partial(_in_blocks, soft=soft, target_T=target_T, count=count, cap=cap, seed=seed)
    return LinearLoss.apply(x_TH, w_VH, find, torch.is_grad_enabled(), seed)


def linear_divergence_reference(
    x_TH: Tensor, w_VH: Tensor, teacher_TV: Tensor, temperature: float, target_T: Tensor, cap: float | None = None
) -> Tensor:
    """Reference implementation for tests, not divided by a count."""
    student_TV = soft_capped(F.linear(x_TH, w_VH).to(compute_dtype(x_TH.dtype)), cap) / temperature
    q_TV = torch.softmax(teacher_TV / temperature, -1)
    kl_T = (q_TV * (q_TV.log() - torch.log_softmax(student_TV, -1))).sum(-1)
    return temperature**2 * kl_T[target_T >= 0].sum()


def _in_blocks(
    x_TH: Tensor, w_VH: Tensor, gradients: Gradients | None, soft: SoftTargets, target_T: Tensor, count: float,
    cap: float | None, seed: float,
) -> Tensor:  # fmt: skip
    wide, block, heat = compute_dtype(x_TH.dtype), block_rows(len(w_VH)), soft.temperature
    total = torch.zeros((), dtype=wide, device=x_TH.device)
    for start in range(0, len(x_TH), block):
        rows = slice(start, start + block)
        x, counted = x_TH[rows], (target_T[rows] >= 0)[:, None]
        logits = soft_capped(F.linear(x, w_VH).to(wide), cap)
        log_p = torch.log_softmax(logits / heat, -1)
        log_q = torch.log_softmax(soft.logits(rows).to(wide) / heat, -1)
        q = log_q.exp()
        total += ((q * (log_q - log_p)).sum(-1, keepdim=True) * counted).sum() * heat**2
        if gradients is not None:
            p = log_p.exp_().sub_(q).mul_(counted * (heat / count * seed))
            if cap is not None:
                p *= 1 - (logits / cap).square_()
            narrow = p.to(x.dtype)
            if gradients[0] is not None:
                torch.mm(narrow, w_VH, out=gradients[0][rows])
            if gradients[1] is not None:
                matmul(narrow.T, x, out=gradients[1], add=True)
    return total / count
