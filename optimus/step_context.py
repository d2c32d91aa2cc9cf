"""The context of one model's current step: the backward pass, deferred weight gradients, cached collectives, the forms (NN,
NT, TN) of matmuls, and the routers' choices of experts.

Each model has one context object, which `parallelize` gives to the model's modules. The context is not thread-local,
because autograd has its own threads on an accelerator.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

T = TypeVar("T")


def region(name: Callable[[], str]) -> AbstractContextManager[object]:
    """Names the operations inside the block for a running profiler; does not call `name` without a profiler."""
    return record_function(name()) if torch.autograd._profiler_enabled() else nullcontext()


class Forms(Protocol):
    """A choice of the form (NN, NT or TN) of each matmul; see `kernels.matmul`."""

    def form(self, shape: Any, a_ML: Tensor, b_LN: Tensor) -> Any:
        """Returns the form in which to compute a matmul of this shape."""


class CollectiveCache:
    """Results of the collectives of a forward pass, in order; the recomputation of the pass reads the results instead
    of communicating.

    Implements communication-aware checkpointing (CAC; TED, section 7.3).
    """

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._again = False

    def begin_again(self) -> None:
        """Makes `take` return the cached results from now on."""
        self._again = True

    def take(self, make: Callable[[], Any]) -> Any:
        """Returns the next result. The forward pass computes the result with `make` and caches it; the recomputation
        reads the cache."""
        if self._again:
            return self._results.popleft()
        made = make()
        self._results.append(_without_history(made))
        return made


class StepContext:
    """The state of a model's current step. The fields are None outside the `with` blocks that set them."""

    def __init__(self) -> None:
        self.deferred: list[Callable[[], None]] | None = (
            None  # functions that add weight gradients to buffers; call them in order
        )
        self.backward: tuple[int, int] | None = None  # the stage and the microbatch of the backward pass
        self.collectives: CollectiveCache | None = None
        self.forms: Forms | None = None
        self.choices: dict[Any, Tensor] | None = None  # number of choices of each expert, by router

    def deferring(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Defers additions to gradient buffers inside the block. Yields a list that collects the functions that add;
        call these functions in order."""
        return self._having("deferred", list[Callable[[], None]]())

    def in_backward(self, stage: int, microbatch: int) -> AbstractContextManager[tuple[int, int]]:
        """Marks the block as a part of the backward pass of `stage` and `microbatch`, to distinguish the gradients of
        several passes."""
        return self._having("backward", (stage, microbatch))

    def recording(self, cache: CollectiveCache) -> AbstractContextManager[CollectiveCache]:
        """Caches the results of a forward pass's collectives inside the block."""
        return self._having("collectives", cache)

    @contextmanager
    def repeating(self, cache: CollectiveCache) -> Iterator[None]:
        """Makes the recomputation of the same forward pass inside the block use the cached results, so that it issues no
        collectives."""
        cache.begin_again()
        with self.recording(cache):
            yield

    def multiplying(self, forms: Forms) -> AbstractContextManager[Forms]:
        """Sets the forms of matmuls inside the block."""
        return self._having("forms", forms)

    def counting(self) -> AbstractContextManager[dict[Any, Tensor]]:
        """Counts how often each router chooses each expert in training passes inside the block. Yields the counts [experts]
        by router."""
        return self._having("choices", dict[Any, Tensor]())

    def chose(self, router: Any, counts_E: Tensor) -> None:
        """Adds the number of times that `router` has chosen each expert. A recomputed pass counts twice, which leaves
        the experts' shares unchanged."""
        if self.choices is not None and torch.is_grad_enabled():
            before_E = self.choices.get(router)
            self.choices[router] = counts_E if before_E is None else before_E + counts_E

    @contextmanager
    def _having(self, field: str, value: T) -> Iterator[T]:
        before = getattr(self, field)
        setattr(self, field, value)
        try:
            yield value
        finally:
            setattr(self, field, before)


def _without_history(value: Any) -> Any:
    """Returns a result with its tensors detached from autograd's graph. The detached tensors share the memory of the
    originals."""
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(map(_without_history, value)) if isinstance(value, tuple) else value
