"""The dense feed-forward layer and the norms.

Legend: T tokens, H hidden, I intermediate.
"""

from torch import Tensor, nn

from optimus.kernels.activation import Activation, activation
from optimus.kernels.backend import compute_dtype
from optimus.model.linear import Linear
from optimus.model.parameters import Size, declare
from optimus.model.parts import LOCAL, Parts


class RMSNorm(nn.Module):
    """RMSNorm with a weight, of the last dim. With `offset` one is added to the weight, which begins at zero."""

    def __init__(self, columns: Size, eps: float, parts: Parts = LOCAL, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = declare(self, "weight", columns, role="vector", initial="zeros" if offset else "ones")
        self.eps, self.offset = eps, offset
        self._norms = parts.norms(columns.dim)

    def forward(self, x_TH: Tensor) -> Tensor:
        weight = self.weight
        if self.offset:  # in fp32, because a bf16 near one has fewer digits than its distance from one
            return self._norms.rms(x_TH, weight.to(compute_dtype(weight.dtype)) + 1, self.eps)
        return self._norms.rms(x_TH, weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm in fp32 whatever the type of x: with weight and bias, or without (OLMo's non-parametric norm)."""

    def __init__(self, columns: Size, eps: float, parts: Parts = LOCAL, *, affine: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = declare(self, "weight", columns, role="vector", initial="ones") if affine else None
        self.bias = declare(self, "bias", columns, role="vector", initial="zeros") if affine else None
        self._norms = parts.norms(columns.dim)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self._norms.layer(x_TH, self.eps, self.weight, self.bias)


class DenseMlp(nn.Module):
    """Feed-forward layer: SwiGLU, or another activation, which need not be gated."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        kind: Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        parts: Parts = LOCAL,
    ) -> None:
        super().__init__()
        residual, ffn = Size("residual", hidden), Size("ffn", intermediate)
        self.kind, self.gated = kind, gated
        if gated:
            self.gate_up = Linear(residual, Size("stack", 2), ffn, bias=bias, parts=parts)
        else:
            self.up = Linear(residual, ffn, bias=bias, parts=parts)
        self.down = Linear(ffn, residual, bias=bias, parts=parts)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(self.activated(x_TH))

    def activated(self, x_TH: Tensor) -> Tensor:
        """[T, I], what the last projection is of."""
        return activation(self.gate_up(x_TH) if self.gated else self.up(x_TH), self.kind, self.gated)
