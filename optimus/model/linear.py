"""The linear layer of all projections. Legend: T rows of any leading shape."""

from typing import Protocol

from torch import Tensor, nn

from optimus.kernels.linear import linear
from optimus.model.parameters import Size, declare


class Product(Protocol):
    """How a projection is carried out."""

    def __call__(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """[..., inputs] to [..., outputs of `weight`, its leading dims laid end to end]."""


def local_product(x: Tensor, weight: nn.Parameter) -> Tensor:
    """The whole weight is here."""
    return linear(x, weight.flatten(0, -2), getattr(weight, "sink", None))


class Linear(nn.Module):
    """x @ W.T without a bias. `weight` is [*outputs, inputs]: several outputs of one input are one product.

    `product` carries it out: on this device, unless it is replaced.
    """

    def __init__(self, inputs: Size, *outputs: Size) -> None:
        super().__init__()
        self.weight = declare(self, "weight", *outputs, inputs)
        self.product: Product = local_product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)
