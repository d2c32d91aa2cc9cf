"""All-gathers whole parameters, or fetches them from the host, on use or ahead of use, and reshards them.

A cache limits the number of gathered chunks (Elixir's rCache), and evicts by the furthest next use (Belady). No
decision may depend on the arrival of data: all ranks must begin the same collectives in the same order.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.state.chunk import Chunk
from optimus.step_context import region

T = TypeVar("T", bound=Chunk)


class UseTrace:
    """Records the uses of chunks in this pass (a step or an evaluation), and expects the uses of the previous pass.

    The order of uses of different chunks may vary between passes.
    """

    def __init__(self) -> None:
        self._now: list[Chunk] = []
        self._expected: list[Chunk] = []
        self._positions: dict[Chunk, list[int]] = {}
        self._counts = Counter[Chunk]()
        self._next = 0  # position of the first expected use that has not happened

    def begin(self) -> None:
        """Begins a pass; the uses of the last pass, if any, become the expected uses."""
        if self._now:
            self._expected, self._now = self._now, []
            self._positions = {}
            for position, chunk in enumerate(self._expected):
                self._positions.setdefault(chunk, []).append(position)
        self._counts.clear()
        self._next = 0

    def use(self, chunk: Chunk) -> None:
        """Records a use of `chunk`, and skips the expected uses that have happened."""
        self._now.append(chunk)
        self._counts[chunk] += 1
        while self._next < len(self._expected) and self.next_use(self._expected[self._next]) > self._next:
            self._next += 1

    def next_use(self, chunk: Chunk, position: int = 0) -> float:
        """Returns the position of the chunk's next expected use, at `position` or later; infinity if there is none."""
        positions = self._positions.get(chunk, ())
        count = bisect_left(positions, position, min(self._counts[chunk], len(positions)))
        return positions[count] if count < len(positions) else math.inf

    def following(self) -> Iterator[tuple[int, Chunk]]:
        """Yields the position and the chunk of each remaining expected use, in order."""
        for position in range(self._next, len(self._expected)):
            if self.next_use(self._expected[position]) <= position:
                yield position, self._expected[position]

    @property
    def order(self) -> dict[Chunk, int]:
        """The position of each used chunk in the order of first uses in this pass."""
        return {chunk: number for number, chunk in enumerate(dict.fromkeys(self._now))}


class ParameterPrefetcher:
    """Gathers the chunks of a unit's parameters before the unit runs, prefetches later chunks, and reshards chunks.

    A unit is a module, or several modules that run in a row.
    """

    def __init__(self) -> None:
        self.gradient_buffers: dict[nn.Parameter, GradientBuffer] = {}
        self._ahead = 0
        self._cache: int | None = None
        self._chunks: dict[nn.Parameter, Chunk] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._units: dict[Sequence[nn.Module], list[Chunk]] = {}
        self._traced: dict[Chunk, None] = {}  # chunks that are offloaded or not always whole on the device
        self._resharding: list[Chunk] = []
        self._frozen: list[Chunk] = []  # frozen chunks outside the cache
        self._in_backward: Sequence[Chunk] = ()  # chunks of the unit whose backward pass began last
        self._training, self._evaluation = UseTrace(), UseTrace()
        self._trace: UseTrace | None = None
        self._uses = 0
        self._last_use = dict[Chunk, int]()

    def hold(self, chunks: Sequence[Chunk], ahead: int, cache: int | None = None) -> None:
        """Registers the `chunks` of the modules' parameters.

        The prefetcher gathers up to `ahead` chunks ahead of use. At most `cache` chunks stay gathered (None: no
        limit), not counting chunks that are always whole on the device.
        """
        self._ahead, self._cache = ahead, cache
        self._units.clear()
        for chunk in chunks:
            self.gradient_buffers |= chunk.gradient_buffers
            self._names |= {each: slot.name for slot, each in zip(chunk.plan.slots, chunk.parameters)}
            if chunk.plan.shard_steps or chunk.plan.offloaded or chunk.elements.prunes:
                self._chunks |= dict.fromkeys(chunk.parameters, chunk)
        self._traced = {chunk: None for chunk in chunks if not chunk.plan.keeps_unsharded or chunk.plan.offloaded}
        self._resharding = [chunk for chunk in chunks if chunk.plan.lifetime == "use"]
        self._frozen = [chunk for chunk in chunks if not chunk.plan.rule.trains and chunk.plan.lifetime != "cache"]

    def begin_step(self) -> None:
        """Begins a pass in the trace of training steps."""
        self._trace = self._training
        self._trace.begin()

    def used_order(self, chunks: Sequence[T]) -> list[T]:
        """Sorts the chunks by their first recorded use in this step; other chunks come last."""
        order = self._training.order
        return sorted(chunks, key=lambda chunk: order.get(chunk, len(order)))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Encloses forward passes outside a step, which have a separate trace."""
        before, self._trace = self._trace, self._evaluation
        self._trace.begin()
        try:
            yield
        finally:
            self._trace = before

    def end_passes(self) -> None:
        """Ends the backward passes of a step: reshards the frozen chunks outside the cache."""
        self._in_backward = ()
        for chunk in self._frozen:
            chunk.unsharded.reshard()

    def unit(self, modules: Sequence[nn.Module], function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """Gathers the parameters of `modules`, and runs `function(x, *args)`, which uses the parameters.

        The backward pass may read the parameters only after the gradient of the first result has arrived. All ranks
        must make the same calls.
        """
        with region(lambda: " and ".join(map(self._name, modules))):
            return self._unit(modules, function, x, *args)

    def _name(self, module: nn.Module) -> str:
        """Returns a name for profilers: the module's path in the model, if known, and the module's class."""
        of = ((self._names[each], own) for own, each in module.named_parameters() if each in self._names)
        path = next((name.removesuffix(own).rstrip(".") for name, own in of), "")
        return f"{path} ({type(module).__name__})" if path else type(module).__name__

    def _unit(self, modules: Sequence[nn.Module], function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        if not self._chunks:
            return function(x, *args)
        chunks = self._units.get(modules)
        if chunks is None:
            parameters = (each for module in modules for each in module.parameters() if each in self._chunks)
            chunks = self._units[modules] = list(dict.fromkeys(self._chunks[each] for each in parameters))
        # Recomputation reshards no chunk, because the backward pass needs other chunks too.
        if chunks and torch._C._current_graph_task_id() == -1:
            for other in self._resharding:
                if other.unsharded.is_present and other not in chunks:
                    other.unsharded.reshard()
        self._use(chunks)
        made = function(x, *args)
        first = made if isinstance(made, Tensor) else made[0]
        # The backward pass of an embedding lookup, whose input is integers, needs no parameters.
        if chunks and self._traced and first.requires_grad and x.is_floating_point():
            first.register_hook(partial(self._before_backward, chunks))
        return made

    def _before_backward(self, chunks: Sequence[Chunk], gradient: Tensor) -> None:
        for other in self._in_backward:
            if other not in chunks and other in self._frozen and other in self._resharding:
                other.unsharded.reshard()
        self._in_backward = chunks
        self._use(chunks)

    def _use(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if not self._evict_for(chunk, chunks):
                raise UserError(
                    f"state.cache: a module uses parameters of {len(chunks)} chunks at a time, but the cache has room for "
                    f"{self._cache}: raise it to {len(chunks)}, or to the memory of {len(chunks)} of the largest chunks"
                )
            chunk.unsharded.gather()
            if chunk in self._traced:
                self._uses += 1
                self._last_use[chunk] = self._uses
                if self._trace is not None:
                    self._trace.use(chunk)
                    self._gather_ahead(self._trace, chunks)

    def _gather_ahead(self, trace: UseTrace, chunks: Sequence[Chunk]) -> None:
        ahead, seen = 0, {*chunks}
        for position, following in trace.following():
            if ahead == self._ahead or len(seen) == len(self._traced):
                return
            if following not in seen:
                nearest = len(seen) == len(chunks)
                seen.add(following)
                ahead += not following.unsharded.is_present
                if not self._evict_for(following, chunks, position, nearest):
                    return
                following.unsharded.start_gather()

    def _evict_for(self, chunk: Chunk, using: Sequence[Chunk], position: int = 0, nearest: bool = True) -> bool:
        """Reshards a chunk if the cache is full; returns True if `chunk` now fits.

        Chunks that are in use, or are used again before `position`, stay. Without `nearest`, the method reshards only
        the chunk with the furthest next use of all.
        """
        if self._cache is None or chunk.plan.keeps_unsharded or chunk.unsharded.has_memory:
            return True
        held = [each for each in self._traced if each.unsharded.has_memory and not each.plan.keeps_unsharded]
        if len(held) < self._cache:
            return True
        next_use = self._trace.next_use if self._trace is not None else lambda each, position=0: math.inf

        def order(candidate: Chunk) -> tuple[float, int]:
            return next_use(candidate, position), -self._last_use.get(candidate, 0)

        free = [each for each in held if each not in using and next_use(each) >= position]
        dropped = max(free if nearest else held, key=order, default=None)
        if dropped is None or dropped not in free:
            return False
        dropped.unsharded.reshard()
        return True
