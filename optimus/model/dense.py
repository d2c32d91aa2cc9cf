"""The dense feed-forward layer.

Legend: T tokens, H hidden, I intermediate.
"""

from torch import Tensor, nn

from optimus.kernels.activation import Activation, activation
from optimus.model.linear import Linear
from optimus.model.parameters import Size


class DenseMlp(nn.Module):
    """Dense feed-forward layer with any `Activation`, with or without a gate; SwiGLU by default."""

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
        """Returns (output [T, H], None): a dense layer has no router statistics. Ignores `position_T`."""
        return self.down(self.activated(x_TH)), None

    def activated(self, x_TH: Tensor) -> Tensor:
        """Returns the input of the down projection [T, I]."""
        return activation(self.gate_up(x_TH) if self.gated else self.up(x_TH), self.kind, self.gated)
