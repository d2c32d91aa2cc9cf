"""The context of one model's current step.

The context is not thread-local, because autograd has its own threads on an accelerator.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

T = TypeVar("T")
P = ParamSpec("P")

# Regions of work on the state, beside the passes through modules.
REDUCTION, NORM, CLEARING = "reduction of gradients", "norm of gradients", "clearing of gradients"
GATHERING, FETCHING, OFFLOADING = "gathering of parameters", "fetching of parameters", "copy of gradients to the host"
UPDATE, UPDATING = "optimizer step", "wait for an update"
PASSES = "forward and backward passes"


def region(name: Callable[[], str]) -> AbstractContextManager[object]:
    """Names the operations inside the block for a running profiler."""
    return record_function(name()) if torch.autograd._profiler_enabled() else nullcontext()


def in_region(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator: calls of the function are in the region `name`."""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            with region(lambda: name):
                return function(*args, **options)

        return call

    return wrap


class Forms(Protocol):
    """Chooses a form (NN, NT or TN; see `optimus.kernels.matmul`) for each matmul A [M, L] @ B [L, N]."""

    def form(self, shape: Any, a_ML: Tensor, b_LN: Tensor) -> Any:
        """Returns the form in which to compute A @ B. `shape` is the `MatmulShape` of the matmul."""


class CollectiveCache:
    """Caches the results of a forward pass's collectives, in order, for the recomputation.

    Implements communication-aware checkpointing (CAC; TED, section 7.3 of the dissertation on AxoNN).
    """

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._again = False

    def begin_again(self) -> None:
        """Makes `take` return the cached results from now on."""
        self._again = True

    def take(self, make: Callable[[], Any]) -> Any:
        """Returns the next result: new from `make` in the forward pass, cached in the recomputation."""
        if self._again:
            return self._results.popleft()
        made = make()
        self._results.append(_without_history(made))
        return made


class StepContext:
    """The state of a model's current step. All fields but `seed` are None outside the `with` blocks that set them."""

    def __init__(self) -> None:
        self.deferred: list[Callable[[], None]] | None = None  # functions that add to gradient buffers
        self.backward: tuple[int, int] | None = None  # the stage and the microbatch of the backward pass
        self.collectives: CollectiveCache | None = None
        self.forms: Forms | None = None
        self.choices: dict[Any, Tensor] | None = None  # by router, how often the router chooses each expert, [experts]
        self.seed = 1.0  # see `differentiating`

    def deferring(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Defers additions to gradient buffers inside the block.

        Yields a list of functions, which grows inside the block. The caller must call the functions in order.
        """
        return self._having("deferred", list[Callable[[], None]]())

    def in_backward(self, stage: int, microbatch: int) -> AbstractContextManager[tuple[int, int]]:
        """Marks the block as a part of the backward pass of `stage` and `microbatch`."""
        return self._having("backward", (stage, microbatch))

    def recording(self, cache: CollectiveCache) -> AbstractContextManager[CollectiveCache]:
        """Caches the results of a forward pass's collectives inside the block."""
        return self._having("collectives", cache)

    @contextmanager
    def repeating(self, cache: CollectiveCache) -> Iterator[None]:
        """Makes the recomputation, which runs inside the block, use the cached results."""
        cache.begin_again()
        with self.recording(cache):
            yield

    def multiplying(self, forms: Forms) -> AbstractContextManager[Forms]:
        """Lets `forms` choose the forms of matmuls inside the block."""
        return self._having("forms", forms)

    def differentiating(self, seed: float) -> AbstractContextManager[float]:
        """Announces that backward passes inside the block begin with the gradient `seed` of the token loss.

        Operations that compute gradients in the forward pass multiply them by the seed, so that they neither underflow
        nor overflow where those of the backward pass would not.
        """
        return self._having("seed", seed)

    def counting(self) -> AbstractContextManager[dict[Any, Tensor]]:
        """Counts how often each router chooses each expert in the block, in passes with gradients.

        Recomputation of a router counts the choices again. Yields the counts [experts] by router.
        """
        return self._having("choices", dict[Any, Tensor]())

    def chose(self, router: Any, counts_E: Tensor) -> None:
        """Adds `counts_E`, which says how often `router` has chosen each of the E experts.

        Has no effect outside `counting` or under `no_grad`.
        """
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
    """Returns `value` with its tensors, also tensors inside tuples, detached from autograd's graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(map(_without_history, value)) if isinstance(value, tuple) else value
