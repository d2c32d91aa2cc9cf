"""The linear layer of all projections. Legend: T rows of any leading shape."""

from torch import Tensor, nn

from optimus.model.parameters import Size, declare
from optimus.model.parts import LOCAL, Parts


class Linear(nn.Module):
    """x @ W.T without a bias. `weight` is [*outputs, inputs]: several outputs of one input are one product."""

    def __init__(self, inputs: Size, *outputs: Size, parts: Parts = LOCAL) -> None:
        super().__init__()
        self.weight = declare(self, "weight", *outputs, inputs)
        self._product, self._use = parts.product(outputs[-1].dim, inputs.dim), parts.parameters.use

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, *self._use(self.weight))
