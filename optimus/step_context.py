"""The context of one model's current step: the backward pass, deferred weight gradients, cached collectives, forms of matrix
products, choices of experts.

Each model has one context object, passed to its users at construction; its fields change only within `with` blocks. The
context is not thread-local, because autograd has its own threads on an accelerator.
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
    """Names the operations inside for a running profiler; without a profiler, `name` is not called."""
    return record_function(name()) if torch.autograd._profiler_enabled() else nullcontext()


class Forms(Protocol):
    """A choice of forms for matrix products; see `kernels.matmul`."""

    def form(self, shape: Any, a_ML: Tensor, b_LN: Tensor) -> Any:
        """Returns the form in which to compute a product of this shape."""


class CollectiveCache:
    """Results of the collectives of a forward pass, in order, returned again when the pass is recomputed.

    (Communication-aware checkpointing, TED, section 7.3.)
    """

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._again = False

    def begin_again(self) -> None:
        """Returns cached results from here on."""
        self._again = True

    def take(self, make: Callable[[], Any]) -> Any:
        """Returns the next result: computed by `make` and cached, or taken from the cache."""
        if self._again:
            return self._results.popleft()
        made = make()
        self._results.append(_without_history(made))
        return made


class StepContext:
    """The state of a model's current step. The fields are None outside the `with` blocks that set them."""

    def __init__(self) -> None:
        self.deferred: list[Callable[[], None]] | None = (
            None  # functions that add weight gradients, to be called in order
        )
        self.backward: tuple[int, int] | None = None  # stage and microbatch of the backward pass
        self.collectives: CollectiveCache | None = None
        self.forms: Forms | None = None
        self.choices: dict[Any, Tensor] | None = None  # by router: how often each expert was chosen

    def deferring(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Defers additions to gradient buffers inside the block; the list collects the functions that add, to be called in
        order."""
        return self._having("deferred", list[Callable[[], None]]())

    def in_backward(self, stage: int, microbatch: int) -> AbstractContextManager[tuple[int, int]]:
        """Marks a backward pass, or a part of it, inside the block; its gradients are told apart from those of other
        passes."""
        return self._having("backward", (stage, microbatch))

    def recording(self, cache: CollectiveCache) -> AbstractContextManager[CollectiveCache]:
        """Caches the results of a forward pass's collectives inside the block."""
        return self._having("collectives", cache)

    @contextmanager
    def repeating(self, cache: CollectiveCache) -> Iterator[None]:
        """Returns cached results to the same forward pass inside the block, which then issues no collectives."""
        cache.begin_again()
        with self.recording(cache):
            yield

    def multiplying(self, forms: Forms) -> AbstractContextManager[Forms]:
        """Sets the forms of matrix products inside the block."""
        return self._having("forms", forms)

    def counting(self) -> AbstractContextManager[dict[Any, Tensor]]:
        """Counts how often each expert is chosen in training inside the block, by router, [experts]."""
        return self._having("choices", dict[Any, Tensor]())

    def chose(self, router: Any, counts_E: Tensor) -> None:
        """Adds the number of times that `router` has chosen each expert. Recomputed passes count twice, alike for all
        microbatches."""
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
    """Detaches the tensors of a result from autograd's graph; the memory is shared. Autograd owns the outputs of a forward
    pass."""
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(map(_without_history, value)) if isinstance(value, tuple) else value
