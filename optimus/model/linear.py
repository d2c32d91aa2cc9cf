"""The linear layer of all projections. Legend: T rows of any leading shape."""

import torch
from torch import Tensor, nn

from optimus.model.low_rank import FactoredProduct
from optimus.model.parameters import Size, declaration, declare
from optimus.model.parts import LOCAL, Parts


class Linear(nn.Module):
    """x @ W.T, plus a bias if asked. `weight` is [*outputs, inputs]: several outputs of one input are one product."""

    def __init__(self, inputs: Size, *outputs: Size, bias: bool = False, parts: Parts = LOCAL) -> None:
        super().__init__()
        self.weight = declare(self, "weight", *outputs, inputs)
        self.bias = declare(self, "bias", *outputs, role="vector", initial="zeros") if bias else None
        self._product, self._gradients = parts.product(outputs[-1].dim, inputs.dim), parts.gradient_buffers
        self.lora_b: nn.Parameter | None = None
        self.lora_a: nn.Parameter | None = None

    def add_factors(self, rank: int) -> None:
        """Have low-rank factors beside the weight, which is to be frozen: `lora_b` [*outputs, rank] and `lora_a` [rank,
        inputs] (`low_rank.py`)."""
        dims = declaration(self, "weight").dims
        *outputs, inputs = map(Size, dims, self.weight.shape)
        own = Size("rank", rank)
        self.lora_b = declare(self, "lora_b", *outputs, own, role="factor", initial="zeros", factor_of=dims)
        self.lora_a = declare(self, "lora_a", own, inputs, role="factor", factor_of=dims)

    def forward(self, x: Tensor) -> Tensor:
        product, weight = self._product, self.weight
        buffer = self._gradients.get(self.weight)
        if self.lora_b is not None and self.lora_a is not None:
            product = product.around(FactoredProduct(product.inner, self.lora_b, self.lora_a, self._gradients))
            # Its gradient is wanted, though it is frozen: the factors' follow from it.
            weight = nn.Parameter(weight.detach(), requires_grad=torch.is_grad_enabled())
        y = product(x, weight, buffer)
        return y if self.bias is None else y + self.bias.flatten()
