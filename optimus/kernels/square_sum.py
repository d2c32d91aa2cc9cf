"""The sum of squares of gradients, for their norm, accumulated in float64 if the device has float64.

A sequential fp32 sum depends on the order of the elements, and pruned chunks store the same gradients in another order.
With Triton, each program writes one number for several thousand gradients, so one pass over memory suffices.
"""

from functools import cache

import torch
from torch import Tensor

from optimus.kernels.backend import use_triton


def square_sum(x: Tensor) -> Tensor:
    """Returns the sum of the squares of all elements, a scalar of `square_dtype`."""
    if use_triton(x):
        from optimus.kernels.triton.square_sum import square_sum

        return square_sum(x, square_dtype(x.device))
    return square_sum_reference(x)


def square_sum_reference(x: Tensor) -> Tensor:
    """Reference implementation, for tests and for devices without Triton."""
    return torch.linalg.vector_norm(x, dtype=square_dtype(x.device)).square()


@cache
def square_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype for accumulating squares: float64, or fp32 on accelerators without float64.

    Accelerators sum in a tree, so their fp32 sums are accurate enough.
    """
    known = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_properties", None)
    return torch.float64 if known is None or getattr(known(device), "has_fp64", True) else torch.float32
