"""The linear layer of all projections, and how it multiplies. Legend: T rows of any leading shape."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct, linear
from optimus.model.low_rank import FactoredProduct
from optimus.model.parameters import Dim, Size, declaration, declare


class Product:
    """How a projection is carried out: `inner` multiplies what is here, by default the whole weight."""

    def __init__(self, inner: MatrixProduct) -> None:
        self.inner = inner

    def around(self, inner: MatrixProduct) -> "Product":
        """The same with another `inner`."""
        return Product(inner)

    def __call__(self, x: Tensor, weight: nn.Parameter, buffer: GradientBuffer | None) -> Tensor:
        """[..., inputs] to [..., outputs of `weight`, its leading dims laid end to end].

        With a `buffer`, the gradient of the weight goes there.
        """
        return linear(x, weight.flatten(0, -2), buffer, self.inner)


class ProjectionModule(nn.Module):
    """Multiplies by `weight`, which subclasses declare: [*outputs, inputs]."""

    replaceable: ClassVar[tuple[str, ...]] = ("product", "gradients")
    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.product: Product = Product(MatrixProduct())
        self.gradients: Mapping[nn.Parameter, GradientBuffer] = {}

    @property
    def dims(self) -> tuple[Dim, Dim]:
        """The last of the outputs', and the inputs'."""
        *_, outputs, inputs = declaration(self, "weight").dims
        return outputs, inputs


class Linear(ProjectionModule):
    """x @ W.T, plus a bias if asked. `weight` is [*outputs, inputs]: several outputs of one input are one product."""

    def __init__(self, inputs: Size, *outputs: Size, bias: bool = False) -> None:
        super().__init__()
        self.weight = declare(self, "weight", *outputs, inputs)
        self.bias = declare(self, "bias", *outputs, role="vector", initial=0.0) if bias else None
        self.lora_b: nn.Parameter | None = None
        self.lora_a: nn.Parameter | None = None

    def add_factors(self, rank: int) -> None:
        """Have low-rank factors beside the weight, which is to be frozen: `lora_b` [*outputs, rank] and `lora_a` [rank,
        inputs] (`low_rank.py`)."""
        dims = declaration(self, "weight").dims
        *outputs, inputs = map(Size, dims, self.weight.shape)
        own = Size("rank", rank)
        self.lora_b = declare(self, "lora_b", *outputs, own, role="factor", initial=0.0, factor_of=dims)
        self.lora_a = declare(self, "lora_a", own, inputs, role="factor", factor_of=dims)

    def forward(self, x: Tensor) -> Tensor:
        product, weight = self.product, self.weight
        buffer = self.gradients.get(self.weight)
        if self.lora_b is not None and self.lora_a is not None:
            product = product.around(FactoredProduct(product.inner, self.lora_b, self.lora_a, self.gradients))
            # Its gradient is wanted, though it is frozen: the factors' follow from it.
            weight = nn.Parameter(weight.detach(), requires_grad=torch.is_grad_enabled())
        y = product(x, weight, buffer)
        return y if self.bias is None else y + self.bias.flatten()
