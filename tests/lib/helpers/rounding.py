"""How far two results may be apart that differ by the order of sums only, on any processor."""

import torch
from torch import Tensor

MARGIN = 4  # how many standard deviations of the rounding errors


def bound(dtype: torch.dtype, *lengths: int, roundings: int = 1) -> float:
    """In relative Frobenius norm, of two results of sums of so many products, one after the other.

    A sum of n rounded terms is off by about sqrt(n) u of its norm where signs are mixed: n errors of at most u, as they come
    (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019). u is half of `eps`. Sums are kept in
    fp32, or more; what is kept in a shorter type between them is rounded so many times, by 2 u where two sums lie
    on either side of a border.
    """
    fp32 = torch.finfo(torch.float32).eps if dtype.itemsize <= 4 else torch.finfo(dtype).eps
    shorter = roundings * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0
    return MARGIN * fp32 / 2 * sum(length**0.5 for length in lengths) * 2**0.5 + shorter


def error(ours: Tensor, theirs: Tensor) -> float:
    """Of ours, in relative Frobenius norm; absolute where theirs are zeros."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    scale = float(theirs.double().norm())
    return float((ours.double() - theirs.double()).norm()) / scale if scale else float(ours.double().norm())
