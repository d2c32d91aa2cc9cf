"""The dense feed-forward layer and the norms.

Legend: T tokens, H hidden, I intermediate.
"""

from torch import Tensor, nn

from optimus.kernels.swiglu import swiglu
from optimus.model.linear import Linear
from optimus.model.parameters import Size, declare
from optimus.model.parts import LOCAL, Parts


class RMSNorm(nn.Module):
    """RMSNorm with a weight, of the last dim."""

    def __init__(self, columns: Size, eps: float, parts: Parts = LOCAL) -> None:
        super().__init__()
        self.weight = declare(self, "weight", columns, role="vector", initial="ones")
        self.eps = eps
        self._norms, self._use = parts.norms(columns.dim), parts.parameters.use

    def forward(self, x_TH: Tensor) -> Tensor:
        weight = self.weight
        self._use(weight)
        return self._norms.rms(x_TH, weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm without weight or bias (OLMo's non-parametric norm), in fp32 whatever the type of x."""

    def __init__(self, columns: Size, eps: float, parts: Parts = LOCAL) -> None:
        super().__init__()
        self.eps = eps
        self._norms = parts.norms(columns.dim)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self._norms.layer(x_TH, self.eps)


class DenseMlp(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False, parts: Parts = LOCAL) -> None:
        super().__init__()
        residual, ffn = Size("residual", hidden), Size("ffn", intermediate)
        self.gate_up = Linear(residual, Size("stack", 2), ffn, bias=bias, parts=parts)
        self.down = Linear(ffn, residual, bias=bias, parts=parts)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x_TH)))
