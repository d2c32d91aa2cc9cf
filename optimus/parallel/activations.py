"""Activation memory: the bytes saved between a forward pass and its backward pass, and the peak of the two passes."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

from optimus.config import Architecture
from optimus.mesh import Mesh
from optimus.parallel.degrees import TensorDegrees, layer_kinds
from optimus.parallel.module_bytes import ModuleBytes, ModulePosition, ModuleSetting, block_bytes, end_bytes
from optimus.parallel.options import StageOptions
from optimus.parallel.recompute import Recomputation

# For each module: bytes without recomputation; bytes with recomputation that reuses cached results of collectives, or
# None without a cache.
Row = Sequence[tuple[ModuleBytes, ModuleBytes | None]]
_Sources = set[tuple[int, ...]]  # `ModuleBytes.source` of the saved inputs


class Activations(NamedTuple):
    """Bytes of activations on one rank."""

    saved: int  # bytes between the forward and the backward pass of one microbatch
    peak: int
    waiting: int = 0  # bytes for deferred weight gradients after the backward pass


class _Region(NamedTuple):
    """Bytes of modules that the backward pass recomputes together, or of one module without recomputation."""

    saved: float
    cached: float  # the part of `saved` for cached results of collectives
    modules: list[tuple[float, float, float]]
    """For each module: bytes of recomputed activations, peak transient bytes, bytes of deferred weight gradients."""


class ActivationPart(NamedTuple):
    """Bytes of a part of a model: the embedding, blocks that run as one, or the output layer."""

    saved: float
    above: float  # the peak in the regions' backward pass, minus `saved`
    waiting: float  # bytes for deferred weight gradients after the regions' backward pass


def activation_bytes(config: Architecture, chosen: Recomputation, **arguments: Any) -> Activations:
    """Returns the activation bytes of a microbatch. `arguments` are those of `activation_parts`."""
    parts = activation_parts(config, chosen, **arguments)
    saved = peak = live = sum(part.saved for part in parts)
    for part in reversed(parts):
        peak = max(peak, live + part.above)
        live += part.waiting - part.saved
    return Activations(round(saved), round(peak), round(live))


def activation_parts(
    config: Architecture,
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
    teachers: tuple[Architecture, ...] = (),
    splits: bool = False,
) -> list[ActivationPart]:
    """Returns the activation bytes of a microbatch, `micro_batch` sequences with `context` tokens each, by part.

    `itemsize` is the number of bytes per element. `layers` are the indices of this rank's blocks, by default all
    blocks. `load` is the load imbalance: the tokens of this rank's experts, or of one expert if `ep` is 1, relative to
    the mean. `first` is true if the rank has the embedding, `last` if the rank has the output layer. `splits` is true
    if weight gradients are deferred (Zero Bubble Pipeline Parallelism).
    """
    mesh, options = mesh or Mesh(), options or StageOptions()
    setting = ModuleSetting.canonical(config, mesh, options, context, itemsize, load, teachers, splits)
    alike = layer_kinds(config, options.degrees)
    segments = chosen.segments(range(config.layers) if layers is None else layers)
    groups = [(tuple(alike[layer] for layer in same), kinds) for same, kinds in segments]
    blocks = {group: _blocks(setting, options.degrees, micro_batch, *group) for group in set(groups)}
    parts = [_part([_alone(end_bytes(setting, "embedding" if first else "positions", micro_batch), set())])]
    parts += [blocks[group] for group in groups]
    return parts + ([_part([_alone(end_bytes(setting, "head", micro_batch), set())])] if last else [])


@lru_cache(maxsize=4096)
def _blocks(
    setting: ModuleSetting, degrees: TensorDegrees, sequences: int, numbers: tuple[int, ...], kinds: tuple[str, ...]
) -> ActivationPart:
    cached = kinds if setting.options.keep_collectives and setting.mesh.size > 1 else ()
    rows = list[Row]()
    for at, number in enumerate(numbers):
        block, again = dict[ModulePosition, ModuleBytes](), dict[ModulePosition, ModuleBytes]()
        ranks = degrees.of_layer(number)
        inside, share = (setting, 1) if ranks is None else (setting.with_tensor(ranks), setting.mesh.tp // ranks)
        layer, here = setting.model.alike[number], sequences // share
        for experts, others in ((False, {"moe"}), (True, {"norm", "attention", "mlp"})):
            block |= block_bytes(inside, layer, here, experts=experts)
            if set(cached) - others:
                again |= block_bytes(inside, layer, here, experts=experts, again=True)
        for _, row in groupby(sorted(block.items()), lambda at: at[0][0]):
            rows.append([(each._replace(source=(at, *each.source)), again.get(position)) for position, each in row])
    stream, saved_inputs = setting.stream(sequences).nbytes, _Sources()
    if "block" in kinds:
        return _part([_run_again([each for row in rows for each in row], stream, saved_inputs)])
    return _part([region for row in rows for region in _row_regions(row, kinds, stream, saved_inputs)])


def _part(regions: Sequence[_Region]) -> ActivationPart:
    live = saved = sum(region.saved for region in regions)
    above = -inf
    for region in reversed(regions):
        live += sum(again for again, _, _ in region.modules) - region.cached
        for again, work, waiting in reversed(region.modules):
            above = max(above, live + work - saved)
            live += waiting - again
        live -= region.saved - region.cached
    return ActivationPart(saved, above, live)


def _row_regions(row: Row, kinds: Collection[str], stream: int, saved_inputs: _Sources) -> Iterator[_Region]:
    """Yields the regions of consecutive modules. Neighbouring modules of the given `kinds` form one region."""
    for again, group in groupby(row, lambda each: each[0].kind in kinds):
        if again:
            yield _run_again(list(group), stream, saved_inputs)
        else:
            yield from (_alone(module, saved_inputs) for module, _ in group)


def _alone(module: ModuleBytes, saved_inputs: _Sources) -> _Region:
    return _Region(module.saved - _shared(module, saved_inputs), 0, [(0, module.work, module.waiting)])


def _shared(module: ModuleBytes, saved_inputs: _Sources) -> float:
    """Adds the saved input, if any, to `saved_inputs`.

    Returns the input's bytes if the set already had the input, else 0.
    """
    shared = module.saved_input if module.source in saved_inputs else 0
    saved_inputs |= {module.source} if module.saved_input else set()
    return shared


def _run_again(modules: Row, stream: int, saved_inputs: _Sources) -> _Region:
    results = [0 if cached is None else cached.saved - stream for _, cached in modules]
    first, (last, cached) = modules[0][0], modules[-1]
    saved = (0 if first.source in saved_inputs else stream) + sum(results)
    saved_inputs.add(first.source)
    there = set(saved_inputs)
    shared = [_shared(module, there) for module, _ in modules]
    made = [module.saved - each for (module, _), each in zip(modules, shared)]
    if cached is not None:  # with cached results, recomputation stops before the end of the last module
        made[-1] = results[-1] + last.saved_input - shared[-1] + cached.work - last.work
    return _Region(
        saved, sum(results), [(size, module.work, module.waiting) for size, (module, _) in zip(made, modules)]
    )
