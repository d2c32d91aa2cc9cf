"""Bytes of activations: what a forward pass keeps for its backward pass, and the most that there are.

What each module keeps and holds is measured by shapes (`module_bytes.py`). It is put together here for any number of blocks
and any choice of what is recomputed.

The peak is what is kept, and of the module whose backward pass is under way what it makes when it is run again and what its
operations hold for a moment. That is found by walking through the modules backwards, as each gives up what it has kept.
Gradients of parameters are held elsewhere (`state/`), but for those that are on their way there.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.parallel.build import StageOptions
from optimus.parallel.module_bytes import ModuleBytes, ModuleSetting, Place, block_bytes, end_bytes
from optimus.parallel.recompute import Recomputation

Modules = Mapping[Place, ModuleBytes]  # of a block
Row = Sequence[tuple[ModuleBytes, ModuleBytes | None]]  # modules as they are, and run again with results cached


class Activations(NamedTuple):
    """Bytes on one rank."""

    kept: int  # between the forward and the backward pass of one microbatch
    peak: int  # most at any time of the two


class _Region(NamedTuple):
    """Bytes of what is run again together, or not at all."""

    kept: float
    modules: list[tuple[float, float]]  # of each what it makes when it is run again, and the most it holds besides


def activation_bytes(
    config: ModelConfig,
    chosen: Recomputation,
    *,
    micro_batch: int,
    context: int,
    itemsize: int,
    mesh: Mesh | None = None,
    options: StageOptions | None = None,
    layers: Iterable[int] | None = None,
    load: float = 1.0,
    first: bool = True,
    last: bool = True,
) -> Activations:
    """For one microbatch of `micro_batch` sequences of `context` tokens, in a type of `itemsize` bytes.

    `mesh` and `options` say how the model is divided, and whether what collectives gave is kept when a module is run again.
    `layers` are the numbers of the blocks on this rank, by default all; `first` and `last` say whether it has the embedding
    and the output layer. Its experts have `load` times the mean number of tokens.
    """
    mesh, options = mesh or Mesh(), options or StageOptions()
    setting = ModuleSetting.of(config, mesh, options, context, itemsize, load)
    alike = config.alike
    numbers = [alike[layer] for layer in (range(config.layers) if layers is None else layers)]
    blocks = [block_bytes(setting, number, micro_batch) for number in numbers]
    caching = chosen.kinds and options.keep_collectives and setting.mesh.size > 1
    cached = [block_bytes(setting, number, micro_batch, True) if caching else {} for number in numbers]
    regions = [_alone(end_bytes(setting, "embedding" if first else "places", micro_batch))]
    regions += _regions(blocks, cached, chosen, setting.stream(micro_batch).nbytes)
    regions += [_alone(end_bytes(setting, "head", micro_batch))] if last else []
    kept = peak = sum(region.kept for region in regions)
    left = kept
    for region in reversed(regions):
        now = left + sum(again for again, _ in region.modules)
        for again, work in reversed(region.modules):
            peak = max(peak, now + work)
            now -= again
        left -= region.kept
    return Activations(round(kept), round(peak))


def _regions(
    blocks: Sequence[Modules], cached: Sequence[Modules], chosen: Recomputation, stream: int
) -> Iterator[_Region]:
    """Those of blocks, of which are known the modules as they are, and run again with the results of collectives cached."""
    rows = [
        [
            [(module, again.get(place)) for place, module in row]
            for _, row in groupby(block.items(), lambda at: at[0][0])
        ]
        for block, again in zip(blocks, cached, strict=True)
    ]
    if "block" in chosen.kinds:
        for start in range(0, len(rows), chosen.every):
            yield _run_again(
                [each for block in rows[start : start + chosen.every] for row in block for each in row], stream
            )
        return
    for number, block in enumerate(rows, 1):
        kinds = chosen.kinds if number % chosen.every == 0 else ()
        for row in block:
            yield from _row_regions(row, kinds, stream)


def _row_regions(row: Row, kinds: Collection[str], stream: int) -> Iterator[_Region]:
    """Those of modules that follow each other; of these kinds are run again, together where they can."""
    for again, group in groupby(row, lambda each: each[0].kind in kinds):
        if again:
            yield _run_again(list(group), stream)
        else:
            yield from (_alone(module) for module, _ in group)


def _alone(module: ModuleBytes) -> _Region:
    """A module that keeps what it needs."""
    return _Region(module.kept, [(0, module.work)])


def _run_again(modules: Row, stream: int) -> _Region:
    """Modules one after the other, of which only the first one's input is kept, and cached results of collectives."""
    results = [0 if cached is None else cached.kept - stream for _, cached in modules]
    made = [module.kept - given for (module, _), given in zip(modules, results)]
    last, cached = modules[-1]
    if cached is not None:  # to the point where all that it keeps is there, and no further
        made[-1] = last.given + cached.work - last.work
    made[0] -= modules[0][0].given
    return _Region(stream + sum(results), [(size, module.work) for size, (module, _) in zip(made, modules)])
