"""The sum of squares, accumulated in float64 if the device has float64."""

from functools import cache

import torch
from torch import Tensor

from optimus.kernels import backend

BLOCK = 1 << 17  # elements; their float64 copy stays in a processor's cache
DEVICE_BLOCK = 1 << 20  # elements that accelerators without Triton copy to float64 at a time


def square_sum(x: Tensor) -> Tensor:
    """Returns the sum of all squared elements, a scalar of dtype `square_dtype(x.device)`."""
    if backend.use_triton(x):
        from optimus.kernels.triton.square_sum import square_sum

        return square_sum(x, square_dtype(x.device))
    if not x.numel():
        return square_sum_reference(x)
    if x.device.type != "cpu":
        return torch.stack([*map(square_sum_reference, x.flatten().split(DEVICE_BLOCK))]).sum()
    blocks = (block.double() for block in x.flatten().split(BLOCK))
    return torch.stack([block.dot(block) for block in blocks]).sum()


def rough_square_sum(x: Tensor) -> Tensor:
    """Returns the sum of all squared elements, a scalar with a relative error of at most 1 % on a CPU, where
    `square_sum` is several times slower.

    The sum is not finite if an element is not finite, or if the sum does not fit fp32.
    """
    if x.device.type != "cpu":
        return square_sum(x)
    # An fp32 sum of n squares has a relative error of at most about n 2^-24: 2^-7 for a block.
    blocks = (block.float() for block in x.flatten().split(BLOCK))
    return torch.stack([block.dot(block) for block in blocks]).double().sum()


def square_sum_reference(x: Tensor) -> Tensor:
    """Reference implementation, also for accelerators without Triton."""
    return torch.linalg.vector_norm(x, dtype=square_dtype(x.device)).square()


@cache
def square_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype for sums of squares: float64, or fp32 on accelerators without float64."""
    known = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_properties", None)
    return torch.float64 if known is None or getattr(known(device), "has_fp64", True) else torch.float32
