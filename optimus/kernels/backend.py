"""Selects Triton or PyTorch for an operation, and the dtype of its computation."""

from functools import cache

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package


def use_triton(x: Tensor) -> bool:
    """Returns True if operations may use Triton kernels for `x`.

    A device's torch module disables Triton kernels by the attribute `runs_triton = False`.
    """
    return x.device.type not in ("cpu", "meta") and x.dtype != torch.float64 and _has_kernels(x.device.type)


def _has_kernels(device: str) -> bool:
    return has_triton_package() and _runs_triton(device)


@cache
def _runs_triton(device: str) -> bool:
    return bool(getattr(torch.get_device_module(device), "runs_triton", True))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums and exponentials of tensors of `dtype`: fp32, or float64 for float64."""
    return dtype if dtype == torch.float64 else torch.float32


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Returns `x` times the scalar tensor `scale` in the dtype of x, rounded once."""
    # On an accelerator, `x * scale` would first round `scale` to the dtype of x.
    return torch.mul(x, scale.view((1,) * x.dim()), out=torch.empty_like(x))
