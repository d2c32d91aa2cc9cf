"""The dense feed-forward layer and the norms.

Legend: T tokens, H hidden, I intermediate.
"""

from torch import Tensor, nn

from optimus.kernels.activation import Activation, activation
from optimus.kernels.backend import compute_dtype
from optimus.model.linear import Linear
from optimus.model.norms import LocalNorms, Norms
from optimus.model.parameters import Size, declare


class Norm(nn.Module):
    """Of the last dim, whose columns are of `dim`."""

    replaceable = ("norms",)

    def __init__(self, columns: Size, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = columns.dim, eps
        self.norms: Norms = LocalNorms()


class RMSNorm(Norm):
    """RMSNorm with a weight, of the last dim. With `offset` one is added to the weight, which begins at zero."""

    def __init__(self, columns: Size, eps: float, *, offset: bool = False) -> None:
        super().__init__(columns, eps)
        self.weight = declare(self, "weight", columns, role="vector", initial="zeros" if offset else "ones")
        self.offset = offset

    def forward(self, x_TH: Tensor) -> Tensor:
        weight = self.weight
        if self.offset:  # in fp32, because a bf16 near one has fewer digits than its distance from one
            return self.norms.rms(x_TH, weight.to(compute_dtype(weight.dtype)) + 1, self.eps)
        return self.norms.rms(x_TH, weight, self.eps)


class LayerNorm(Norm):
    """LayerNorm in fp32 whatever the type of x: with weight and bias, or without (OLMo's non-parametric norm)."""

    def __init__(self, columns: Size, eps: float, *, affine: bool = False) -> None:
        super().__init__(columns, eps)
        self.weight = declare(self, "weight", columns, role="vector", initial="ones") if affine else None
        self.bias = declare(self, "bias", columns, role="vector", initial="zeros") if affine else None

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.norms.layer(x_TH, self.eps, self.weight, self.bias)


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
    ) -> None:
        super().__init__()
        residual, ffn = Size("residual", hidden), Size("ffn", intermediate)
        self.kind, self.gated = kind, gated
        if gated:
            self.gate_up = Linear(residual, Size("stack", 2), ffn, bias=bias)
        else:
            self.up = Linear(residual, ffn, bias=bias)
        self.down = Linear(ffn, residual, bias=bias)

    def forward(self, x_TH: Tensor, position_T: Tensor | None = None) -> tuple[Tensor, None]:
        """(output, no statistics): as a sparse layer is called."""
        return self.down(self.activated(x_TH)), None

    def activated(self, x_TH: Tensor) -> Tensor:
        """[T, I], what the last projection is of."""
        return activation(self.gate_up(x_TH) if self.gated else self.up(x_TH), self.kind, self.gated)
