"""Activation checkpointing: the chosen modules save their inputs, and the backward pass recomputes their activations.

Recomputes modules of every n-th block (selective activation checkpointing, the Optimus paper, section 1), or segments
of n whole blocks (`ac` blocks in the dissertation on AxoNN, section 3.3.1). By default, recomputation reuses cached
results of collectives (communication-aware checkpointing, the same dissertation, section 7.3). Ranges of layers may
recompute other modules than the rest of the model (layer-wise strategies, Galvatron, arXiv 2211.13878).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    blocks.

    Each of `ranges` has other kinds for a range of layers, and n = 1.
    """

    kinds: tuple[str, ...] = ()
    every: int = 1
    ranges: tuple[tuple[range, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        every = f", recompute_every: {self.every}" if self.every > 1 else ""
        return f"recompute: [{', '.join(self.kinds)}]{every}"

    def __bool__(self) -> bool:
        """True if some block is recomputed."""
        return bool(self.kinds) or any(kinds for _, kinds in self.ranges)

    def of_layer(self, layer: int) -> tuple[tuple[str, ...], int]:
        """Returns the kinds of modules and n for a layer."""
        return next(((kinds, 1) for layers, kinds in self.ranges if layer in layers), (self.kinds, self.every))

    def segments(self, layers: Iterable[int]) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
        """Yields the layers that run as one, and the kinds of modules that they recompute.

        `layers` are those of a pipeline stage. The count of every n-th block begins anew at each change of the kinds.
        """
        for (kinds, every), same in groupby(layers, self.of_layer):
            row = tuple(same)
            if "block" in kinds:
                yield from ((row[start : start + every], kinds) for start in range(0, len(row), every))
            else:
                yield from (((layer,), () if position % every else kinds) for position, layer in enumerate(row, 1))


def at_once(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`, without recomputation."""
    return function(*args)


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
        for row in rows:
            blocks, runs = [*row], list[tuple[range, Callable[..., Any]]]()
            for layers, kinds in self._chosen.segments(row.layers):
                start = runs[-1][0].stop if runs else 0
                runs.append((range(start, start + len(layers)), self._again if "block" in kinds else at_once))
                for block in blocks[start : start + len(layers)]:
                    for unit in units_of(block):
                        self.arrange_unit(unit, kinds)
            row.run_in(runs)
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
