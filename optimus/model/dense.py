"""The dense feed-forward layer and the norms.

Legend: T tokens, H hidden, I intermediate.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from optimus.kernels.rms_norm import rms_norm
from optimus.kernels.swiglu import swiglu
from optimus.model.linear import Linear
from optimus.model.parameters import Size, declare


class RMSNorm(nn.Module):
    """RMSNorm with a weight (OLMoE)."""

    def __init__(self, columns: Size, eps: float) -> None:
        super().__init__()
        self.weight = declare(self, "weight", columns, role="vector", initial="ones")
        self.eps = eps
        self.normalise: Callable[[Tensor, Tensor, float], Tensor] = rms_norm  # unless the columns are elsewhere too

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.normalise(x_TH, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm without weight or bias (OLMo's non-parametric norm), in fp32 whatever the type of x."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.normalise: Callable[[Tensor, float], Tensor] = layer_norm  # unless the columns are elsewhere too

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.normalise(x_TH, self.eps)


def layer_norm(x_TH: Tensor, eps: float) -> Tensor:
    """LayerNorm of the last dim without weight or bias."""
    return F.layer_norm(x_TH, x_TH.shape[-1:], eps=eps)


class DenseMlp(nn.Module):
    """SwiGLU feed-forward layer without biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        residual, ffn = Size("residual", hidden), Size("ffn", intermediate)
        self.gate_up = Linear(residual, Size("stack", 2), ffn)
        self.down = Linear(ffn, residual)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x_TH)))
