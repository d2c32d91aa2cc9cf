"""What holds for the step of one model that is under way: the backward pass, deferred weight gradients, cached collectives,
forms of products, choices of experts.

One object per model, given to those who need it when they are made; its fields change within `with` blocks alone. It is no
thread-local: autograd has threads of its own on an accelerator.
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
    """Names what is done inside to a profiler; where none is running, `name` is not asked for."""
    return record_function(name()) if torch.autograd._profiler_enabled() else nullcontext()


class Forms(Protocol):
    """In which forms matrix products are made; see `kernels.matmul`."""

    def form(self, shape: Any, a_ML: Tensor, b_LN: Tensor) -> Any:
        """The form in which to make a product of this shape."""


class CollectiveCache:
    """What the collectives of a forward pass gave, in order, to be given again when the pass is recomputed.

    (Communication-aware checkpointing, TED, section 7.3.)
    """

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._again = False

    def begin_again(self) -> None:
        """From here on, give what is cached."""
        self._again = True

    def take(self, make: Callable[[], Any]) -> Any:
        """The next result: made and cached, or given again."""
        if self._again:
            return self._results.popleft()
        made = make()
        self._results.append(_without_history(made))
        return made


class StepContext:
    """The fields are None outside of the `with` blocks that set them."""

    def __init__(self) -> None:
        self.deferred: list[Callable[[], None]] | None = None  # what adds weight gradients, to be called in order
        self.backward: tuple[int, int] | None = None  # the stage and the microbatch of the backward pass
        self.collectives: CollectiveCache | None = None
        self.forms: Forms | None = None
        self.choices: dict[Any, Tensor] | None = None  # by router: how often each expert was chosen

    def deferring(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Within, additions to gradient buffers are deferred: the list holds what makes them, to be called in order."""
        return self._having("deferred", list[Callable[[], None]]())

    def in_backward(self, stage: int, microbatch: int) -> AbstractContextManager[tuple[int, int]]:
        """Within is a backward pass, or a part of it: its gradients are told apart from those of others."""
        return self._having("backward", (stage, microbatch))

    def recording(self, cache: CollectiveCache) -> AbstractContextManager[CollectiveCache]:
        """Within, what the collectives of a forward pass give is cached."""
        return self._having("collectives", cache)

    @contextmanager
    def repeating(self, cache: CollectiveCache) -> Iterator[None]:
        """Within, the same forward pass is given what is cached, and issues no collective."""
        cache.begin_again()
        with self.recording(cache):
            yield

    def multiplying(self, forms: Forms) -> AbstractContextManager[Forms]:
        """Within, matrix products are made in these forms."""
        return self._having("forms", forms)

    def counting(self) -> AbstractContextManager[dict[Any, Tensor]]:
        """Within, how often each expert is chosen in training is added up by router, [experts]."""
        return self._having("choices", dict[Any, Tensor]())

    def chose(self, router: Any, counts_E: Tensor) -> None:
        """So often `router` has chosen each expert. What is recomputed counts twice, each microbatch alike."""
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
    """The same, its tensors as others of the same memory: autograd makes its own what a forward pass gives."""
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(map(_without_history, value)) if isinstance(value, tuple) else value
