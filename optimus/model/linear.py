"""The linear layer of all projections, and its matmuls."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct, linear
from optimus.model.low_rank import MaskedFactors, ThinFactors, has_zeros
from optimus.model.parameters import Dim, Size, declaration, declare


class Product:
    """The matmul of a projection. `inner` multiplies by this rank's weight: here the whole weight, in subclasses a shard."""

    def __init__(self, inner: MatrixProduct) -> None:
        self.inner = inner

    def around(self, inner: MatrixProduct) -> "Product":
        """Returns a copy of this `Product` with another `inner`."""
        return Product(inner)

    def __call__(self, x: Tensor, weight: nn.Parameter, buffer: GradientBuffer | None) -> Tensor:
        """Maps [..., inputs] to [..., outputs]. Flattens the leading dims of `weight`.

        The backward pass adds the weight's gradient to `buffer`, if there is one.
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
        """The last logical dim of the outputs, and the logical dim of the inputs."""
        *_, outputs, inputs = declaration(self, "weight").dims
        return outputs, inputs


class Linear(ProjectionModule):
    """Computes x @ W.T plus an optional bias. `weight` is [*outputs, inputs], so one matmul computes stacked outputs."""

    def __init__(self, inputs: Size, *outputs: Size, bias: bool = False) -> None:
        super().__init__()
        self.weight = declare(self, "weight", *outputs, inputs)
        self.bias = declare(self, "bias", *outputs, role="vector", initial=0.0) if bias else None
        self.lora_b: nn.Parameter | None = None
        self.lora_a: nn.Parameter | None = None
        self.pruned: bool | None = None

    def add_factors(self, rank: int) -> None:
        """Adds low-rank factors `lora_b` [*outputs, rank] and `lora_a` [rank, inputs] to the weight.

        The weight should be frozen; see `low_rank.py`. `pruned` is True if the weight has zeros. Code that changes the
        weight must set `pruned` to None, so that the next forward pass looks for zeros again.
        """
        dims = declaration(self, "weight").dims
        *outputs, inputs = map(Size, dims, self.weight.shape)
        own = Size("rank", rank)
        self.lora_b = declare(self, "lora_b", *outputs, own, role="factor", initial=0.0, factor_of=dims)
        self.lora_a = declare(self, "lora_a", own, inputs, role="factor", factor_of=dims)

    def forward(self, x: Tensor) -> Tensor:
        product, weight = self.product, self.weight
        buffer = self.gradients.get(self.weight)
        if self.lora_b is not None and self.lora_a is not None:
            if self.pruned is None:
                self.pruned = has_zeros(weight)
            factors = MaskedFactors if self.pruned else ThinFactors
            product = product.around(factors(product.inner, self.lora_b, self.lora_a, self.gradients))
            # The weight must require a gradient, or autograd would not call the factors' `weight_gradient`.
            weight = nn.Parameter(weight.detach(), requires_grad=torch.is_grad_enabled())
        y = product(x, weight, buffer)
        return y if self.bias is None else y + self.bias.flatten()
