"""Norms: the table of norms, the modules, and the normalisation of rows whose columns are all on one device.

Legend: T tokens, H columns.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from optimus.kernels.backend import compute_dtype
from optimus.kernels.rms_norm import rms_norm
from optimus.model.architecture import ModelConfig
from optimus.model.parameters import Size, declare


class Norms:
    """Computes norms over whole rows. Here a device has all columns; `parallel.norms` is for sharded columns."""

    def rms(self, x_TH: Tensor, eps: float, weight_H: Tensor | None = None) -> Tensor:
        """Applies RMSNorm, with or without a weight."""
        return rms_norm(x_TH, weight_H, eps)

    def layer(self, x_TH: Tensor, eps: float, weight_H: Tensor | None = None, bias_H: Tensor | None = None) -> Tensor:
        """Applies LayerNorm, with a weight and a bias or with neither."""
        return F.layer_norm(x_TH, x_TH.shape[-1:], weight_H, bias_H, eps)


class Norm(nn.Module):
    """Base of norms over the last dim, whose logical dim is `dim`."""

    replaceable = ("norms",)

    def __init__(self, columns: Size, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = columns.dim, eps
        self.norms = Norms()


class RMSNorm(Norm):
    """RMSNorm over the last dim with a weight. With `offset`, the norm multiplies by 1 + weight; the weight starts at 0."""

    def __init__(self, columns: Size, eps: float, *, offset: bool = False) -> None:
        super().__init__(columns, eps)
        self.weight = declare(self, "weight", columns, role="vector", initial=float(not offset))
        self.offset = offset

    def forward(self, x_TH: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.offset:  # in at least fp32: bf16 numbers near one are too coarse for the small distance from one
            weight = weight.to(compute_dtype(weight.dtype)) + 1
        return self.norms.rms(x_TH, self.eps, weight)


class LayerNorm(Norm):
    """LayerNorm with a weight and a bias if `affine`, otherwise without parameters (OLMo's non-parametric norm)."""

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
    """Builds the norm of these columns: of the residual stream, or of queries or keys."""
    of_stream, of_heads = NORMS[config.norm]
    return (of_stream if columns.dim == "residual" else of_heads)(columns, config.norm_eps)
