"""Activation checkpointing: what is chosen keeps its input, and its forward pass is run again in the backward pass.

Chosen are modules (selective activation checkpointing, the Optimus paper, section 1) of every n-th block, or segments of n
whole blocks (the dissertation on AxoNN, section 3.3.1, where n is called ac). A norm and the module that it feeds are run
again together where both are chosen, so that what goes from one to the other is not kept either.

The router's statistics are outputs like any other, so running it again counts nothing twice. No module draws random numbers,
so no state of their generators is kept. What collectives gave the first time is cached and given again, unless memory
is dearer than communication (communication-aware checkpointing, TED, section 7.3).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from optimus.model.transformer import Blocks
from optimus.model.units import Unit, in_turn, units_of
from optimus.step_context import CollectiveCache, StepContext


class Recomputation(NamedTuple):
    """What is run again: norm, attention, mlp or moe of every `every`-th block; or block: segments of `every` blocks."""

    kinds: tuple[str, ...] = ()
    every: int = 1

    def __str__(self) -> str:
        every = f", recompute_every: {self.every}" if self.every > 1 else ""
        return f"recompute: [{', '.join(self.kinds)}]{every}"


def run_unit(modules: Sequence[nn.Module], function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which runs `modules`: their parameters are here."""
    return function(*args)


class Recompute:
    """Runs units, and recomputes the activations of what is `chosen`.

    `unit` has the parameters of modules here while a function runs them, and once more for its backward pass. What
    collectives gave is cached in `step`; without `keep_collectives` they are issued again, which all ranks then do together.
    What is run again with cached results can be run again once only: no second backward pass through the same graph.
    """

    def __init__(
        self,
        chosen: Recomputation,
        step: StepContext,
        unit: Callable[..., Any] = run_unit,
        *,
        keep_collectives: bool = True,
    ) -> None:
        self._chosen, self._step, self._unit = chosen, step, unit
        self._contexts = self._caching if keep_collectives else noop_context_fn

    def arrange(self, rows: Iterable[Blocks], ends: Iterable[Unit]) -> None:
        """Have these run the units of blocks that run in a row, and those at the ends of a model."""
        kinds, every = self._chosen
        for row in rows:
            if "block" in kinds:
                row.run_in(every, self._again)
            for number, block in enumerate(row, 1):
                for unit in units_of(block):
                    self.arrange_unit(unit, kinds if number % every == 0 else ())
        for unit in ends:
            self.arrange_unit(unit)

    def arrange_unit(self, unit: Unit, kinds: Collection[str] = ()) -> None:
        """Have this run a unit, and recompute its modules of these kinds; those beside each other together."""
        calls = []
        for again, steps in groupby(unit.steps, lambda step: step[0] in kinds):
            modules = tuple(module for _, module in steps)
            row = unit.row(modules)
            call = partial(self._unit, modules, partial(self._again, row) if again else row)
            calls.append((call, unit.module in modules))
        unit.run_by(partial(in_turn, calls))

    def _again(self, function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts)

    def _caching(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Contexts of the first run and of the second; of one call, as others may come before its backward pass."""
        cache = CollectiveCache()
        return self._step.recording(cache), self._step.repeating(cache)
