"""Activation checkpointing: the chosen modules save their inputs and results of collectives, and the backward pass
recomputes their activations.

Users choose modules of every n-th block (selective activation checkpointing, the Optimus paper, section 1), or segments
of n whole blocks (`ac` blocks in the dissertation on AxoNN, section 3.3.1). If users choose a norm and the module that
reads the norm's output, the backward pass recomputes both modules together. Then autograd does not save the activation
between the modules either.

Recomputation saves no state of random-number generators. By default, recomputation reuses cached results of collectives
(communication-aware checkpointing, TED, section 7.3); otherwise, recomputation repeats the collectives.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from optimus.model.causal import BlockRow
from optimus.model.units import Unit, in_turn, units_of
from optimus.step_context import CollectiveCache, StepContext


class Recomputation(NamedTuple):
    """The kinds of modules to recompute in every n-th block: norm, attention, mlp, moe; or `block` for segments of n
    blocks."""

    kinds: tuple[str, ...] = ()
    every: int = 1

    def __str__(self) -> str:
        every = f", recompute_every: {self.every}" if self.every > 1 else ""
        return f"recompute: [{', '.join(self.kinds)}]{every}"


def run_unit(modules: Sequence[nn.Module], function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`. The function runs `modules`, whose parameters need no all-gather."""
    return function(*args)


class Recompute:
    """Runs units, and recomputes the `chosen` activations.

    `unit(modules, function, *args)` runs `function`, which runs `modules`. `unit` may all-gather the parameters of
    `modules` before the function, and again for the backward pass. `step` caches results of collectives; without
    `keep_collectives`, all ranks repeat the collectives. Recomputation with cached results works only once, so a second
    backward pass through the same graph is impossible.
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

    def arrange(self, rows: Iterable[BlockRow], others: Iterable[Unit]) -> None:
        """Makes this object the runner of the units of the blocks in `rows`, and of the units in `others`."""
        kinds, every = self._chosen
        for row in rows:
            if "block" in kinds:
                row.run_in(every, self._again)
            for number, block in enumerate(row, 1):
                for unit in units_of(block):
                    self.arrange_unit(unit, kinds if number % every == 0 else ())
        for unit in others:
            self.arrange_unit(unit)

    def arrange_unit(self, unit: Unit, kinds: Collection[str] = ()) -> None:
        """Makes this object the runner of a unit, and recomputes the unit's modules of these kinds, neighbours
        together."""
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
        """Returns the contexts of the first run and of the recomputation, with a new cache for each call."""
        cache = CollectiveCache()
        return self._step.recording(cache), self._step.repeating(cache)
