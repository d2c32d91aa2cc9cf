"""Activation checkpointing: the chosen modules save their inputs, and the backward pass recomputes their activations.

Recomputes modules of every n-th block (selective activation checkpointing, the Optimus paper, section 1), or segments
of n whole blocks (`ac` blocks in the dissertation on AxoNN, section 3.3.1). By default, recomputation reuses cached
results of collectives (communication-aware checkpointing, the same dissertation, section 7.3).
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
    """Returns `function(*args)`, without an all-gather of the parameters of `modules`."""
    return function(*args)


class Recompute:
    """Runs units, and recomputes the `chosen` activations.

    `unit(modules, function, *args)` returns `function(*args)`, and may all-gather the parameters of `modules` first.
    `function` runs these modules. With `keep_collectives`, recomputation reuses cached results of collectives; a second
    backward pass through the same graph is then impossible.
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
        """Makes this object run the units of the blocks in `rows`, and the units in `others`."""
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
        """Makes this object run a unit, with recomputation of the unit's modules of these kinds."""
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
        cache = CollectiveCache()
        return self._step.recording(cache), self._step.repeating(cache)
