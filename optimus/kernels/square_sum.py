"""The sum of squares of gradients, accumulated in float64 if the device has float64.

A float64 sum hardly depends on the order of the gradients.
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
    """Reference implementation, for tests and for computation without Triton."""
    return torch.linalg.vector_norm(x, dtype=square_dtype(x.device)).square()


@cache
def square_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype for accumulating squares: float64, or fp32 on accelerators without float64."""
    known = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_properties", None)
    return torch.float64 if known is None or getattr(known(device), "has_fp64", True) else torch.float32
