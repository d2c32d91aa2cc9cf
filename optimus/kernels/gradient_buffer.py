"""Gradient buffers, in which kernels accumulate weight gradients instead of returning new tensors to autograd.

A step can defer the weight gradients (Zero Bubble Pipeline Parallelism).

Legend: E experts, A rows and B columns of an expert's weight, P tokens of an expert.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from optimus.kernels.matmul import matmul
from optimus.step_context import Forms, StepContext


class GradientBuffer(ABC):
    """Accumulates the gradient of one parameter (Megatron-Core's main_grad)."""

    def __init__(self, step: StepContext | None = None) -> None:
        self._step = step or StepContext()

    @property
    def deferred(self) -> bool:
        """True if `add` defers additions."""
        return self._step.deferred is not None

    @abstractmethod
    def open(self) -> Tensor:
        """Returns the tensor to add a gradient to."""

    @abstractmethod
    def close(self) -> None:
        """Signals that the tensor of `open` contains the gradient."""

    @abstractmethod
    def found(self) -> None:
        """Signals that the backward pass no longer needs the parameter."""

    def add(self, write: Callable[[Tensor], object]) -> None:
        """Calls `write` with the tensor to add the gradient to, later if `deferred`.

        `write` must not read the parameter: the parameter's memory may already be free.
        """

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
    """Accumulates the gradient in the tensor `grad`."""

    def __init__(self, grad: Tensor, step: StepContext | None = None) -> None:
        super().__init__(step)
        self.grad = grad
        self.added = 0

    def open(self) -> Tensor:
        return self.grad

    def close(self) -> None:
        self.added += 1

    def found(self) -> None: ...


class WeightGradient:
    """The gradient of `weight_EAB`, one matrix per expert, in a gradient buffer or in a new tensor.

    The caller must call `add` exactly once for each expert in `busy`, and for no other expert.
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
        """Adds `left_AP @ right_PB` to an expert's gradient in the buffer, or writes the product to the new tensor.

        The caller may overwrite the operands afterwards.
        """
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
        """Allocates deferred operands with P = `rows` if the buffer defers additions.

        The weight must be on the meta device, because the operands have no values.
        """
        if self._deferred is not None:
            _, a, b = self._weight_EAB.shape
            self._deferred.append((0, self._weight_EAB.new_empty(a, rows), self._weight_EAB.new_empty(rows, b)))

    def close(self) -> Tensor | None:
        """Ends the additions. Returns the gradient for autograd; None with a buffer, or if no gradient is wanted."""
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
