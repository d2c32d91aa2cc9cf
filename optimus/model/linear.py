"""The linear layer of all projections. Legend: T rows of any leading shape."""

from torch import Tensor, nn

from optimus.model.parameters import Size, declare
from optimus.model.parts import LOCAL, Parts


class Linear(nn.Module):
    """x @ W.T, plus a bias if asked. `weight` is [*outputs, inputs]: several outputs of one input are one product."""

    def __init__(self, inputs: Size, *outputs: Size, bias: bool = False, parts: Parts = LOCAL) -> None:
        super().__init__()
        self.weight = declare(self, "weight", *outputs, inputs)
        self.bias = declare(self, "bias", *outputs, role="vector", initial="zeros") if bias else None
        self._product, self._gradients = parts.product(outputs[-1].dim, inputs.dim), parts.gradient_buffers

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(x, self.weight, self._gradients.get(self.weight))
        return y if self.bias is None else y + self.bias.flatten()
