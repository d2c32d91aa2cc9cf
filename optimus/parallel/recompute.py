"""Activation checkpointing: what is chosen keeps its input, and its forward pass is run again in the backward pass.

Chosen are modules (selective activation checkpointing, the Optimus paper, section 1) of every n-th block, or segments of n
whole blocks (the dissertation on AxoNN, section 3.3.1, where n is called ac). A norm and the module that it feeds are run
again together where both are chosen, so that what goes from one to the other is not kept either.

The router's statistics are outputs like any other, so running it again counts nothing twice. No module draws random numbers,
so no state of their generators is kept. What collectives gave the first time is cached and given again, unless memory
is dearer than communication (communication-aware checkpointing, TED, section 7.3).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple

from torch.utils.checkpoint import checkpoint, noop_context_fn

from optimus.model.parts import Runner, run_unit
from optimus.step_context import CollectiveCache, StepContext


class Recomputation(NamedTuple):
    """What is run again: norm, attention, mlp or moe of every `every`-th block; or block: segments of `every` blocks."""

    kinds: tuple[str, ...] = ()
    every: int = 1

    def __str__(self) -> str:
        every = f", recompute_every: {self.every}" if self.every > 1 else ""
        return f"recompute: [{', '.join(self.kinds)}]{every}"


class Recompute(Runner):
    """The `Runner` that recomputes the activations of what is `chosen`.

    What collectives gave is cached in `step`; without `keep_collectives` they are issued again, which all ranks then do
    together. What is run again with cached results can be run again once only: no second backward pass through the same
    graph.
    """

    def __init__(
        self,
        chosen: Recomputation,
        step: StepContext,
        unit: Callable[..., Any] = run_unit,
        *,
        keep_collectives: bool = True,
    ) -> None:
        super().__init__(unit)
        self._chosen, self._step = chosen, step
        self._contexts = self._caching if keep_collectives else noop_context_fn

    def segments(self, blocks: int) -> Sequence[range]:
        if "block" not in self._chosen.kinds:
            return [range(blocks)]
        return [range(blocks)[start : start + self._chosen.every] for start in range(0, blocks, self._chosen.every)]

    def segment(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._again(function, *args) if "block" in self._chosen.kinds else function(*args)

    def modules(self, number: int, x: Any, *modules: tuple[Any, ...]) -> Any:
        kinds = self._chosen.kinds if (number + 1) % self._chosen.every == 0 else ()
        for again, group in groupby(modules, lambda each: each[0] in kinds):
            x = self.row(list(group), x, self._again if again else None)
        return x

    def _again(self, function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts)

    def _caching(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Contexts of the first run and of the second; of one call, as others may come before its backward pass."""
        cache = CollectiveCache()
        return self._step.recording(cache), self._step.repeating(cache)
