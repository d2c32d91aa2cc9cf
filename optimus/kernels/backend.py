"""Which path an operation takes: Triton on an accelerator, PyTorch on the CPU."""

from functools import cache

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package


def use_triton(x: Tensor) -> bool:
    """Whether operations on `x` run as Triton kernels.

    They compute in fp32, so float64, which only checks of precision use, stays with PyTorch. So does a device for which
    this PyTorch comes without Triton, or whose module says that it runs none.
    """
    return x.device.type not in ("cpu", "meta") and x.dtype != torch.float64 and _has_kernels(x.device.type)


def _has_kernels(device: str) -> bool:
    return has_triton_package() and _runs_triton(device)


@cache
def _runs_triton(device: str) -> bool:
    return bool(getattr(torch.get_device_module(device), "runs_triton", True))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums and exponentials of tensors of `dtype` are made: fp32, or float64, which stays exact."""
    return dtype if dtype == torch.float64 else torch.float32


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """`x` times `scale`, a scalar of a wider type, in the type of x and rounded once.

    As a tensor without dims the scalar would be rounded to the type of x first: every element would be off alike.
    """
    return torch.mul(x, scale.view((1,) * x.dim()), out=torch.empty_like(x))
