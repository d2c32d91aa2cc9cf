"""Gradients of weights that a kernel adds where they accumulate, instead of handing autograd a fresh tensor to add.

For the experts of a large layer the fresh tensors are hundreds of megabytes a pass: to allocate, clear, write and read again
costs more than many of the products.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from optimus.kernels.matmul import matmul


class Sink(Protocol):
    """Where the gradient of one parameter accumulates."""

    def open(self) -> Tensor:
        """The buffer to add to, of the parameter's shape, in the type of the gradients."""

    def close(self) -> None:
        """The gradient has been added; called once per backward pass."""


class WeightGradient:
    """The gradient of `weight_EAB`, a matrix per expert, in a sink or in a fresh tensor.

    `busy` are the experts for which something will be added, once each. Where it is not `wanted`, nothing is computed.
    """

    def __init__(self, weight_EAB: Tensor, sink: Sink | None, busy: Collection[int], wanted: bool) -> None:
        self._sink, self._wanted = sink, wanted
        if not wanted:
            return
        if sink is not None:
            self._grad_EAB = sink.open().view(weight_EAB.shape)
        else:
            self._grad_EAB = torch.empty_like(weight_EAB)
            for idle in sorted(set(range(len(weight_EAB))) - set(busy)):
                self._grad_EAB[idle] = 0
        narrow = self._grad_EAB.dtype != weight_EAB.dtype
        self._product_AB = torch.empty_like(weight_EAB[0]) if narrow and len(weight_EAB) else None

    def add(self, expert: int, left_AP: Tensor, right_PB: Tensor) -> None:
        """Add the product of the two to the gradient of an expert's matrix."""
        if not self._wanted:
            return
        grad_AB = self._grad_EAB[expert]
        if self._sink is None:
            matmul(left_AP, right_PB, out=grad_AB, rows_vary=True)
        elif self._product_AB is not None:
            grad_AB.add_(matmul(left_AP, right_PB, out=self._product_AB, rows_vary=True))
        else:
            matmul(left_AP, right_PB, out=grad_AB, add=True, rows_vary=True)

    def close(self) -> Tensor | None:
        """What autograd is to add: nothing where a sink has it or nobody wants it."""
        if not self._wanted:
            return None
        if self._sink is None:
            return self._grad_EAB
        self._sink.close()
        return None
