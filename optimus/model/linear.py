"""The linear layer, its base classes and its matmul."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct, linear
from optimus.model.low_rank import MaskedFactors, ThinFactors, has_zeros
from optimus.model.parameters import Dim, Size, declaration, declare


class Product:
    """The matmul of a projection with this rank's weight."""

    def __init__(self, inner: MatrixProduct) -> None:
        self.inner = inner

    def around(self, inner: MatrixProduct) -> "Product":
        """Returns a copy of this `Product` with another `inner`."""
        return Product(inner)

    def __call__(self, x: Tensor, weight: nn.Parameter, buffer: GradientBuffer | None) -> Tensor:
        """Maps [..., inputs] to [..., outputs]. The backward pass adds the weight's gradient to `buffer`, if any."""
        return linear(x, weight.flatten(0, -2), buffer, self.inner)


class ProjectionModule(nn.Module):
    """A module that multiplies by `weight` [*outputs, inputs], which subclasses declare."""

    replaceable: ClassVar[tuple[str, ...]] = ("product", "gradients")
    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.product: Product = Product(MatrixProduct())
        self.gradients: Mapping[nn.Parameter, GradientBuffer] = {}

    @property
    def dims(self) -> tuple[Dim, Dim]:
        """The last logical dim of the outputs, and the logical dim of the inputs."""
        *_, outputs, inputs = declaration(self, "weight").dims
        return outputs, inputs


class Factored:
    """A module whose `weight` can have low-rank factors `lora_b` [*outputs, rank] and `lora_a` [rank, inputs]."""

    gradients: Mapping[nn.Parameter, GradientBuffer]
    pruned: bool | None = None  # True if the weight has zeros; None: not known yet
    _parameters: dict[str, nn.Parameter | None]

    @property
    def takes_factors(self) -> bool:
        """True if `add_factors` can be called."""
        return True

    def add_factors(self: Any, rank: int) -> None:
        """Adds low-rank factors of `rank` to a frozen weight.

        Code that later changes the weight must set `pruned` to None.
        """
        dims = declaration(self, "weight").dims
        *outputs, inputs = map(Size, dims, self.weight.shape)
        own = Size("rank", rank)
        self.lora_b = declare(self, "lora_b", *outputs, own, role="factor", initial=0.0, factor_of=dims)
        self.lora_a = declare(self, "lora_a", own, inputs, role="factor", factor_of=dims)

    def multiply(self, product: Product, x: Tensor, weight: nn.Parameter) -> Tensor:
        """Returns `product(x, weight)`. Adds the contribution of the low-rank factors if the module has factors."""
        buffer = self.gradients.get(weight)
        b, a = (self._parameters.get(name) for name in ("lora_b", "lora_a"))
        if b is not None and a is not None:
            if self.pruned is None:
                self.pruned = has_zeros(weight)
            factors = MaskedFactors if self.pruned else ThinFactors
            product = product.around(factors(product.inner, b, a, self.gradients))
            # The weight must require a gradient, or autograd would not call the factors' `weight_gradient`.
            weight = nn.Parameter(weight.detach(), requires_grad=torch.is_grad_enabled())
        return product(x, weight, buffer)


class Linear(Factored, ProjectionModule):
    """Computes x @ W.T plus an optional bias, where W is `weight` [*outputs, inputs] with the output dims flattened."""

    def __init__(self, inputs: Size, *outputs: Size, bias: bool = False) -> None:
        super().__init__()
        self.weight = declare(self, "weight", *outputs, inputs)
        self.bias = declare(self, "bias", *outputs, role="vector", initial=0.0) if bias else None
        self.register_parameter("lora_b", None)
        self.register_parameter("lora_a", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(self.product, x, self.weight)
        return y if self.bias is None else y + self.bias.flatten()
