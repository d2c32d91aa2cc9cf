"""Bytes of activations: what a forward pass keeps for its backward pass, and the most that there are.

What each module keeps and holds is measured by shapes (`module_bytes.py`). It is put together here for any number of blocks
and any choice of what is recomputed.

The peak is what is kept, and of the module whose backward pass is under way what it makes when it is run again and what its
operations hold for a moment. That is found by walking through the modules backwards, as each gives up what it has kept.
Gradients of parameters are held elsewhere (`state/`), but for those that are on their way there.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from math import inf
from typing import NamedTuple

from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.parallel.module_bytes import ModuleBytes, ModuleSetting, Place, block_bytes, end_bytes
from optimus.parallel.options import StageOptions
from optimus.parallel.recompute import Recomputation

Row = Sequence[tuple[ModuleBytes, ModuleBytes | None]]  # modules as they are, and run again with results cached
_Sources = set[tuple[int, ...]]  # inputs of modules that are kept


class Activations(NamedTuple):
    """Bytes on one rank."""

    saved: int  # between the forward and the backward pass of one microbatch
    peak: int  # most at any time of the two
    waiting: int = 0  # of a backward pass that is split, between its two parts


class _Region(NamedTuple):
    """Bytes of what is run again together, or not at all."""

    saved: float
    cached: float  # of it results of collectives, which the cache gives up when the modules are run again
    modules: list[tuple[float, float, float]]
    """Of each what it makes when it is run again, the most it holds besides, and what waits for the part for the weights."""


class _Part(NamedTuple):
    """Bytes of regions one after the other."""

    saved: float
    above: float  # what there is at most in their backward pass, beside what they and those before keep
    waiting: float  # when they have done it, for the part for the weights


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
    teachers: tuple[ModelConfig, ...] = (),
    splits: bool = False,
) -> Activations:
    """For one microbatch of `micro_batch` sequences of `context` tokens, in a type of `itemsize` bytes.

    `mesh` and `options` say how the model is divided, and whether what collectives gave is kept when a module is run again.
    `layers` are the numbers of the blocks on this rank, by default all; `first` and `last` say whether it has the embedding
    and the output layer, where `teachers` are asked. Its experts have `load` times the mean number of tokens. `splits`: the
    gradients of weights are found in a part of the backward pass of their own, later (Zero Bubble Pipeline Parallelism).
    """
    mesh, options = mesh or Mesh(), options or StageOptions()
    setting = ModuleSetting.of(config, mesh, options, context, itemsize, load, teachers, splits)
    alike = config.alike
    numbers = [alike[layer] for layer in (range(config.layers) if layers is None else layers)]
    groups = list(_groups(numbers, chosen))
    blocks = {group: _blocks(setting, micro_batch, *group) for group in set(groups)}
    parts = [_part([_alone(end_bytes(setting, "embedding" if first else "places", micro_batch), set())])]
    parts += [blocks[group] for group in groups]
    parts += [_part([_alone(end_bytes(setting, "head", micro_batch), set())])] if last else []
    kept = peak = left = sum(part.saved for part in parts)
    for part in reversed(parts):
        peak = max(peak, left + part.above)
        left += part.waiting - part.saved
    return Activations(round(kept), round(peak), round(left))


def _groups(numbers: Sequence[int], chosen: Recomputation) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """(blocks that stand together, what of them is run again): whole ones, or modules of every so-manyth."""
    if "block" in chosen.kinds:
        for start in range(0, len(numbers), chosen.every):
            yield tuple(numbers[start : start + chosen.every]), ("block",)
        return
    for place, number in enumerate(numbers, 1):
        yield (number,), tuple(chosen.kinds) if place % chosen.every == 0 else ()


@lru_cache(maxsize=4096)
def _blocks(setting: ModuleSetting, sequences: int, numbers: tuple[int, ...], kinds: tuple[str, ...]) -> _Part:
    """Of blocks that stand together, alike to these."""
    cached = kinds if setting.options.keep_collectives and setting.mesh.size > 1 else ()
    rows = list[Row]()
    for at, number in enumerate(numbers):
        block, again = dict[Place, ModuleBytes](), dict[Place, ModuleBytes]()
        for experts, others in ((False, {"moe"}), (True, {"norm", "attention", "mlp"})):
            block |= block_bytes(setting, number, sequences, experts=experts)
            if set(cached) - others:
                again |= block_bytes(setting, number, sequences, experts=experts, again=True)
        for _, row in groupby(sorted(block.items()), lambda at: at[0][0]):
            rows.append([(each._replace(source=(at, *each.source)), again.get(place)) for place, each in row])
    stream, kept = setting.stream(sequences).nbytes, _Sources()
    if "block" in kinds:
        return _part([_run_again([each for row in rows for each in row], stream, kept)])
    return _part([region for row in rows for region in _row_regions(row, kinds, stream, kept)])


def _part(regions: Sequence[_Region]) -> _Part:
    """Those together: walking through them backwards."""
    left = kept = sum(region.saved for region in regions)
    above = -inf
    for region in reversed(regions):
        left += sum(again for again, _, _ in region.modules) - region.cached
        for again, work, waiting in reversed(region.modules):
            above = max(above, left + work - kept)
            left += waiting - again
        left -= region.saved - region.cached
    return _Part(kept, above, left)


def _row_regions(row: Row, kinds: Collection[str], stream: int, kept: _Sources) -> Iterator[_Region]:
    """Those of modules that follow each other; of these kinds are run again, together where they can."""
    for again, group in groupby(row, lambda each: each[0].kind in kinds):
        if again:
            yield _run_again(list(group), stream, kept)
        else:
            yield from (_alone(module, kept) for module, _ in group)


def _alone(module: ModuleBytes, kept: _Sources) -> _Region:
    """A module that keeps what it needs, unless that is `kept` already."""
    return _Region(module.saved - _shared(module, kept), 0, [(0, module.work, module.waiting)])


def _shared(module: ModuleBytes, kept: _Sources) -> float:
    """Bytes of its input that are `kept` already; from here on they are."""
    shared = module.given if module.source in kept else 0
    kept |= {module.source} if module.given else set()
    return shared


def _run_again(modules: Row, stream: int, kept: _Sources) -> _Region:
    """Modules one after the other, of which only the first one's input is kept, and cached results of collectives."""
    results = [0 if cached is None else cached.saved - stream for _, cached in modules]
    first, (last, cached) = modules[0][0], modules[-1]
    saved = (0 if first.source in kept else stream) + sum(results)
    kept.add(first.source)
    there = set(kept)
    shared = [_shared(module, there) for module, _ in modules]
    made = [module.saved - each for (module, _), each in zip(modules, shared)]
    if cached is not None:  # to the point where all that it keeps is there, and no further
        made[-1] = results[-1] + last.given - shared[-1] + cached.work - last.work
    return _Region(
        saved, sum(results), [(size, module.work, module.waiting) for size, (module, _) in zip(made, modules)]
    )
