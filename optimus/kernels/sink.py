"""Gradients of weights that a kernel adds where they accumulate, instead of handing autograd a fresh tensor to add.

For the experts of a large layer the fresh tensors are hundreds of megabytes a pass: to allocate, clear, write and read again
costs more than many of the products.

Such a gradient needs not be found where autograd passes by: within `deferring` it is put off, so that the backward pass
finds the gradients of inputs alone, for which other ranks of a pipeline wait (Zero Bubble Pipeline Parallelism).
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from optimus.kernels.matmul import matmul

_deferred: list[Callable[[], None]] | None = None  # no thread-local: autograd has threads of its own on an accelerator


class Sink(Protocol):
    """Where the gradient of one parameter accumulates."""

    def open(self) -> Tensor:
        """The buffer to add to, of the parameter's shape, in the type of the gradients."""

    def close(self) -> None:
        """The gradient has been added; called once per backward pass."""

    def expect(self) -> None:
        """In place of autograd's present backward pass, something will be added after it."""


class TensorSink:
    """A `Sink` that is nothing but a tensor."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
        self.added = 0  # times that something has been

    def open(self) -> Tensor:
        return self.grad

    def close(self) -> None:
        self.added += 1

    def expect(self) -> None: ...


@contextmanager
def deferring() -> Iterator[list[Callable[[], None]]]:
    """What is added to sinks in here is put off: the list holds what adds it, to be called in order."""
    global _deferred
    before, _deferred = _deferred, []
    try:
        yield _deferred
    finally:
        _deferred = before


def add_gradient(sink: Sink, write: Callable[[Tensor], object]) -> None:
    """Have `write` add a gradient to the tensor that it is given, the sink's; later, within `deferring`."""

    @torch.no_grad()
    def add() -> None:
        write(sink.open())
        sink.close()

    if _deferred is None:
        add()
    else:
        sink.expect()
        _deferred.append(add)


class WeightGradient:
    """The gradient of `weight_EAB`, a matrix per expert, in a sink or in a fresh tensor.

    `busy` are the experts for which something will be added, once each. Where it is not `wanted`, nothing is computed.
    """

    def __init__(self, weight_EAB: Tensor, sink: Sink | None, busy: Collection[int], wanted: bool) -> None:
        self._sink, self._wanted, self._shape = sink, wanted, weight_EAB.shape
        self._product_AB: Tensor | None = None
        self._put_off: list[tuple[int, Tensor, Tensor]] | None = None
        if not wanted:
            return
        if sink is None:
            self._grad_EAB = torch.empty_like(weight_EAB)
            for idle in sorted(set(range(len(weight_EAB))) - set(busy)):
                self._grad_EAB[idle] = 0
        elif _deferred is not None:
            self._put_off = []
        else:
            self._grad_EAB = sink.open().view(weight_EAB.shape)

    def add(self, expert: int, left_AP: Tensor, right_PB: Tensor) -> None:
        """Add the product of the two, which may then be overwritten, to the gradient of an expert's matrix."""
        if not self._wanted:
            return
        if self._put_off is not None:
            self._put_off.append((expert, left_AP.clone(), right_PB.clone()))
            return
        grad_AB = self._grad_EAB[expert]
        if self._sink is None:
            matmul(left_AP, right_PB, out=grad_AB, rows_vary=True)
        elif grad_AB.dtype != left_AP.dtype:
            if self._product_AB is None:
                self._product_AB = left_AP.new_empty(grad_AB.shape)
            grad_AB.add_(matmul(left_AP, right_PB, out=self._product_AB, rows_vary=True))
        else:
            matmul(left_AP, right_PB, out=grad_AB, add=True, rows_vary=True)

    def close(self) -> Tensor | None:
        """What autograd is to add: nothing where a sink has it or nobody wants it."""
        if not self._wanted:
            return None
        if self._sink is None:
            return self._grad_EAB
        if self._put_off is None:
            self._sink.close()
        else:
            add_gradient(self._sink, self._add_what_was_put_off)
        return None

    def _add_what_was_put_off(self, grad: Tensor) -> None:
        products, self._put_off = self._put_off or [], None
        self._grad_EAB = grad.view(self._shape)
        for expert, left_AP, right_PB in products:
            self.add(expert, left_AP, right_PB)
