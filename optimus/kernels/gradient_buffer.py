"""Gradient buffers: kernels add the gradients of weights where they accumulate, instead of handing autograd a fresh tensor.

For the experts of a large layer the fresh tensors are hundreds of megabytes a pass: to allocate, clear, write and read again
costs more than many of the products.

Such a gradient needs not be found where autograd passes by: it may be deferred, so that the backward pass finds the
gradients of inputs alone, for which other ranks of a pipeline wait (Zero Bubble Pipeline Parallelism).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from optimus.kernels.matmul import matmul
from optimus.step_context import Forms, StepContext


class GradientBuffer(ABC):
    """Where the gradient of one parameter accumulates (Megatron-Core's main_grad), in every backward pass once.

    What is added while `step` defers weight gradients is added later.
    """

    def __init__(self, step: StepContext | None = None) -> None:
        self._step = step or StepContext()

    @property
    def deferred(self) -> bool:
        """Whether what is added now is deferred."""
        return self._step.deferred is not None

    @abstractmethod
    def open(self) -> Tensor:
        """The tensor to add to, of the parameter's shape, in the type of the gradients."""

    @abstractmethod
    def close(self) -> None:
        """The gradient has been added; called once per backward pass."""

    @abstractmethod
    def found(self) -> None:
        """The backward pass needs the parameter no more: its gradient will be added now or later. Once per pass, too."""

    def add(self, write: Callable[[Tensor], object]) -> None:
        """Have `write` add a gradient to the tensor that it is given; later, where weight gradients are deferred. From this
        call on, the parameter may be without memory."""

        @torch.no_grad()
        def add() -> None:
            write(self.open())
            self.close()

        self.found()
        if self._step.deferred is None:
            add()
        else:
            self._step.deferred.append(add)


class TensorBuffer(GradientBuffer):
    """A gradient buffer that is nothing but a tensor."""

    def __init__(self, grad: Tensor, step: StepContext | None = None) -> None:
        super().__init__(step)
        self.grad = grad
        self.added = 0  # times that something has been

    def open(self) -> Tensor:
        return self.grad

    def close(self) -> None:
        self.added += 1

    def found(self) -> None: ...


class WeightGradient:
    """The gradient of `weight_EAB`, a matrix per expert, in a gradient buffer or in a fresh tensor.

    `busy` are the experts for which something will be added, once each. Where it is not `wanted`, nothing is computed.
    """

    def __init__(
        self,
        weight_EAB: Tensor,
        buffer: GradientBuffer | None,
        busy: Collection[int],
        wanted: bool,
        forms: Forms | None = None,
    ) -> None:
        self._weight_EAB, self._buffer, self._wanted, self._forms = weight_EAB, buffer, wanted, forms
        self._product_AB: Tensor | None = None
        self._deferred: list[tuple[int, Tensor, Tensor]] | None = None
        if not wanted:
            return
        if buffer is None:
            self._grad_EAB = torch.empty_like(weight_EAB)
            for idle in sorted(set(range(len(weight_EAB))) - set(busy)):
                self._grad_EAB[idle] = 0
        elif buffer.deferred:
            self._deferred = []
        else:
            self._grad_EAB = buffer.open().view(weight_EAB.shape)

    def add(self, expert: int, left_AP: Tensor, right_PB: Tensor) -> None:
        """Add the product of the two, which may then be overwritten, to the gradient of an expert's matrix."""
        if not self._wanted:
            return
        if self._deferred is not None:
            self._deferred.append((expert, left_AP.clone(), right_PB.clone()))
            return
        grad_AB, forms = self._grad_EAB[expert], self._forms
        if self._buffer is None:
            matmul(left_AP, right_PB, out=grad_AB, rows_vary=True, forms=forms)
        elif grad_AB.dtype != left_AP.dtype and left_AP.device.type in ("cpu", "meta"):
            if self._product_AB is None:
                self._product_AB = left_AP.new_empty(grad_AB.shape)
            grad_AB.add_(matmul(left_AP, right_PB, out=self._product_AB, rows_vary=True, forms=forms))
        else:
            matmul(left_AP, right_PB, out=grad_AB, add=True, rows_vary=True, forms=forms)

    def add_shapes(self, rows: int) -> None:
        """Of products of so many rows, which nobody computes, what would be deferred."""
        if self._deferred is not None:
            _, a, b = self._weight_EAB.shape
            self._deferred.append((0, self._weight_EAB.new_empty(a, rows), self._weight_EAB.new_empty(rows, b)))

    def close(self) -> Tensor | None:
        """What autograd is to add: nothing where a buffer has it or nobody wants it."""
        if not self._wanted:
            return None
        if self._buffer is None:
            return self._grad_EAB
        if self._deferred is None:
            self._buffer.found()
            self._buffer.close()
        else:
            self._buffer.add(self._add_deferred)
        return None

    def _add_deferred(self, grad: Tensor) -> None:
        products, self._deferred = self._deferred or [], None
        self._grad_EAB = grad.view(self._weight_EAB.shape)
        for expert, left_AP, right_PB in products:
            self.add(expert, left_AP, right_PB)
