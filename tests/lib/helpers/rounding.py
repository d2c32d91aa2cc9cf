"""Bounds on the difference of two results that differ by the order of additions only, on any processor."""

import torch
from torch import Tensor

MARGIN = 4  # standard deviations of the rounding errors


def bound(dtype: torch.dtype, *lengths: int, roundings: int = 1) -> float:
    """Returns the bound in relative Frobenius norm, for results of consecutive products that sum these numbers of
    terms.

    A sum of n rounded terms of mixed signs is off by about sqrt(n) u of its norm; u is half of `eps` (Higham and Mary,
    A new approach to probabilistic rounding error analysis, 2019). Sums are kept in fp32 or wider. Each of the
    `roundings` to a shorter type in between adds up to 2 u, for sums on either side of a rounding border.
    """
    fp32 = torch.finfo(torch.float32).eps if dtype.itemsize <= 4 else torch.finfo(dtype).eps
    shorter = roundings * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0
    return MARGIN * fp32 / 2 * sum(length**0.5 for length in lengths) * 2**0.5 + shorter


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative error in Frobenius norm; absolute if theirs is zero."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    scale = float(theirs.double().norm())
    return float((ours.double() - theirs.double()).norm()) / scale if scale else float(ours.double().norm())
