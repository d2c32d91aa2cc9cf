"""Norms over the last dim, and the table of norms. Legend: T rows, H columns."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from optimus.kernels.backend import compute_dtype
from optimus.kernels.rms_norm import rms_norm
from optimus.model.architecture import ModelConfig
from optimus.model.parameters import Size, declare


class Norms:
    """Computes norms over the last dim. All columns must be on this device, except in a subclass that shards them."""

    def rms(self, x_TH: Tensor, eps: float, weight_H: Tensor | None = None) -> Tensor:
        """Applies RMSNorm over the last dim."""
        return rms_norm(x_TH, weight_H, eps)

    def layer(self, x_TH: Tensor, eps: float, weight_H: Tensor | None = None, bias_H: Tensor | None = None) -> Tensor:
        """Applies LayerNorm over the last dim."""
        return F.layer_norm(x_TH, x_TH.shape[-1:], weight_H, bias_H, eps)


class Norm(nn.Module):
    """Base class of norms over the last dim. `dim` is the logical dim of the columns."""

    replaceable = ("norms",)

    def __init__(self, columns: Size, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = columns.dim, eps
        self.norms = Norms()


class RMSNorm(Norm):
    """RMSNorm with a weight. With `offset`, the norm multiplies by 1 + weight."""

    def __init__(self, columns: Size, eps: float, *, offset: bool = False) -> None:
        super().__init__(columns, eps)
        self.weight = declare(self, "weight", columns, role="vector", initial=float(not offset))
        self.offset = offset

    def forward(self, x_TH: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.offset:  # in at least fp32: bf16 is too coarse near one
            weight = weight.to(compute_dtype(weight.dtype)) + 1
        return self.norms.rms(x_TH, self.eps, weight)


class LayerNorm(Norm):
    """LayerNorm, with a weight and a bias if `affine`."""

    def __init__(self, columns: Size, eps: float, *, affine: bool = False) -> None:
        super().__init__(columns, eps)
        self.weight = declare(self, "weight", columns, role="vector", initial=1.0) if affine else None
        self.bias = declare(self, "bias", columns, role="vector", initial=0.0) if affine else None

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.norms.layer(x_TH, self.eps, self.weight, self.bias)


_Make = Callable[[Size, float], nn.Module]
NORMS: dict[str, tuple[_Make, _Make]] = {  # `model.norm`: (norm of the residual stream, norm of queries and keys)
    "layer": (LayerNorm, RMSNorm),
    "layer_affine": (partial(LayerNorm, affine=True), RMSNorm),
    "rms": (RMSNorm, RMSNorm),
    "rms_offset": (partial(RMSNorm, offset=True), partial(RMSNorm, offset=True)),
}


def norm_of(config: ModelConfig, columns: Size) -> nn.Module:
    """Builds the norm of the residual stream if `columns.dim` is "residual"; otherwise the norm of queries or keys."""
    of_stream, of_heads = NORMS[config.norm]
    return (of_stream if columns.dim == "residual" else of_heads)(columns, config.norm_eps)
