"""Finds the strategy of each layer by dynamic programming, for the least time within the memory of each rank.

The layers of a rank and their memory are a knapsack (Galvatron, arXiv 2211.13878): a layer takes one of several strategies,
each with its seconds and its bytes. Strategies differ in recomputation and in the number of tensor-parallel ranks. A border
between them costs nothing, because sequence parallelism divides the rows in the same way (`parallel.tensor.SequenceRows`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from optimus.config import Architecture
from optimus.config.parallel import LayersConfig
from optimus.parallel.activations import ActivationPart, activation_parts
from optimus.parallel.degrees import SAME_DEGREES, TensorDegrees
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.estimates import Live, stages_of_ranks
from optimus.plan.chunks import PartCounts
from optimus.plan.job import Job
from optimus.plan.memory import KINDS, activation_arguments, activations_of, ranks_of, run_activations, state_of
from optimus.plan.rank_costs import RankCosts
from optimus.plan.step import blocks_of_stages, counts_of, recomputed_block, state_seconds
from optimus.resolve.stages import live_of

_STEPS = 64  # of the memory: of all states with as many of these steps, the search keeps the fastest
_LIMITS = 8  # of the transient bytes that the search tries


class Option(NamedTuple):
    """A strategy of a layer: the seconds that it adds, the bytes that it saves in all live microbatches, and the bytes
    above the saved ones of all layers at the peak of its backward pass."""

    seconds: float
    saved: float
    above: float


def cheapest(
    rows: Sequence[Sequence[Option]], budget: float, share: float = 0.0, steps: int = _STEPS, limits: int = _LIMITS
) -> list[int] | None:
    """Returns the index of an option for each row, with the least sum of seconds that fits into `budget` bytes.

    `rows` are in the order of the forward pass. The bytes are the sum of `saved`, and the maximum over the rows of
    `above` less `share` of the `saved` of the later rows, which the backward pass has freed before. Returns None if
    nothing fits. The result fits, and is at least as fast as all that leave `len(rows)` of the `steps` of the budget and
    one `limits`-th of the largest `above` free. If `saved` are multiples of a step, and `above` and `share` times `saved`
    multiples of a `limits`-th, it is the fastest of all.
    """
    most = max(option.above for row in rows for option in row)
    above_W = np.linspace(0.0, max(0.0, most), limits + 1)
    room_W = budget - above_W
    shape = limits + 1, steps + 1
    times_WM, saved_WM = np.full(shape, np.inf), np.zeros(shape)
    times_WM[:, 0] = 0.0
    before = list[np.ndarray[tuple[int], np.dtype[np.int64]]]()  # from a state to the option and the state before
    for row in reversed(rows):
        seconds_O, added_O, peak_O = (np.array(values)[:, None, None] for values in zip(*row))
        times_OWM, saved_OWM = seconds_O + times_WM, added_O + saved_WM
        fits = (peak_O - share * saved_WM <= above_W[:, None]) & (saved_OWM <= room_W[:, None])
        at = np.flatnonzero(fits & np.isfinite(times_OWM))
        at = at[np.lexsort((saved_OWM.flat[at], times_OWM.flat[at]))]
        step = np.minimum(saved_OWM.flat[at] * (steps / budget), steps).astype(np.int64)
        states, first = np.unique(at // shape[1] % shape[0] * shape[1] + step, return_index=True)
        source = np.full(times_WM.size, -1)
        source[states] = at[first]
        before.append(source)
        times_WM, saved_WM = np.full(shape, np.inf), np.zeros(shape)
        times_WM.flat[states], saved_WM.flat[states] = times_OWM.flat[at[first]], saved_OWM.flat[at[first]]
    state = int(times_WM.argmin())
    if not np.isfinite(times_WM.flat[state]):
        return None
    chosen = []
    for source in reversed(before):
        option, state = divmod(int(source[state]), times_WM.size)
        chosen.append(option)
    return chosen


class LayerStrategy(NamedTuple):
    """The modules that a layer recomputes, and its tensor-parallel ranks; None: as many as the run has."""

    recompute: frozenset[str]
    tensor: int | None = None


Parts = Callable[[PartCounts, LayerStrategy], Sequence[ActivationPart]]
"""Returns the activations of a stage's parts with one strategy for all its blocks."""


def strategies_of(job: Job, sets: Sequence[frozenset[str]]) -> list[LayerStrategy]:
    """Returns the strategies for the layers of a job: each of `sets` with each number of tensor-parallel ranks."""
    outputs, batch = job.mesh.tp_out, job.train.micro_batch
    alike = job.mesh.tp_in == 1 and job.parallel.splits_sequence
    fewer = [n for n in range(1, outputs) if alike and outputs % n == 0 == batch % (outputs // n)]
    return [LayerStrategy(recompute, tensor) for recompute in sets for tensor in (None, *fewer)]


def stage_parts(job: Job) -> Parts:
    """Returns a function that computes the activations of the parts of a stage of `job`."""
    shapes, layers = activation_arguments(job), job.model.layers
    known = dict[tuple[PartCounts, LayerStrategy], Sequence[ActivationPart]]()

    def parts(counts: PartCounts, strategy: LayerStrategy) -> Sequence[ActivationPart]:
        if (counts, strategy) not in known:
            chosen = Recomputation(tuple(kind for kind in KINDS if kind in strategy.recompute))
            degrees = SAME_DEGREES if strategy.tensor is None else TensorDegrees(((range(layers), strategy.tensor),))
            own = shapes | {"options": replace(shapes["options"], degrees=degrees)}
            first, last = bool(counts.first), bool(counts.last)
            known[counts, strategy] = activation_parts(
                job.model, chosen, layers=counts.layers, first=first, last=last, **own
            )
        return known[counts, strategy]

    return parts


Free = Callable[[Job, tuple[PartCounts, ...]], float]
"""Returns the bytes that the state of a job leaves free on a rank with these stages."""


class Layerwise:
    """Finds strategies by layer for jobs that differ in data parallelism, pipeline and state only."""

    def __init__(self, strategies: Sequence[LayerStrategy], parts: Parts) -> None:
        self._strategies, self._parts = strategies, parts
        self._degrees = [*dict.fromkeys(strategy.tensor for strategy in strategies if strategy.tensor is not None)]
        self._rows: dict[object, list[list[Option]]] = {}

    def fitted(self, job: Job, work: RankCosts, free: Free) -> Iterator[Job]:
        """Yields jobs with the fastest strategies that fit; none if nothing fits.

        `job` recomputes nothing and has no ranges of layers. With several numbers of tensor-parallel ranks, yields a job
        for collectives of the state that overlap nothing, and a job for ones that take no time.
        """
        for exposed in (1.0, 0.0) if self._degrees else (0.0,):
            if (placed := self._placed(job, work, free, exposed)) is not None:
                yield placed

    def least_share(self, work: RankCosts) -> float:
        """Returns the least time of a layer with fewer tensor-parallel ranks, relative to its time in `work`."""
        jobs = [work.job, *(with_degree(work.job, degree) for degree in self._degrees)]
        seconds = [[_block_seconds(work.with_job(job), layer) for layer in work.modules] for job in jobs]
        return min(min(ways) / ways[0] for ways in zip(*seconds))

    def _placed(self, job: Job, work: RankCosts, free: Free, exposed: float) -> Job | None:
        sizes = blocks_of_stages(job)
        counts, numbered = (counts_of(job.model, sizes, numbered=each) for each in (False, True))
        chosen_of, found = [self._strategies[0]] * job.model.layers, dict[object, list[list[int]] | None]()
        owned = stages_of_ranks(job.parallel.schedule, job.mesh.pp, job.parallel.stages_per_rank)
        for own, lives in zip(owned, live_of(job.config, job.microbatches), strict=True):
            stages = tuple(counts[stage] for stage in own)
            key = stages, tuple(lives)
            if key not in found:
                found[key] = self._chosen(work.with_job(job), stages, lives, free(job, stages), exposed)
            if (chosen := found[key]) is None:
                return None
            for stage, options in zip(own, chosen):
                for layer, option in zip(numbered[stage].numbers, options, strict=True):
                    chosen_of[layer] = self._strategies[option]
        placed = with_strategies(job, chosen_of)
        ranks = ranks_of(placed)
        activations = activations_of(ranks, run_activations(placed))
        free_bytes = (free(placed, tuple(each._replace(start=None) for each in rank.stages)) for rank in ranks)
        return placed if all(sum(parts.values()) <= most for parts, most in zip(activations, free_bytes)) else None

    def _chosen(
        self, work: RankCosts, stages: tuple[PartCounts, ...], lives: Sequence[Live], budget: float, exposed: float
    ) -> list[list[int]] | None:
        """Returns the strategy of each block of each stage of a rank; None if nothing fits."""
        if budget <= 0:
            return None
        saved, waiting = (
            [max(numbers) for numbers in zip(*(getattr(live, name) for live in lives))] for name in Live._fields
        )
        rows = list[list[Option]]()
        for counts, number, later in zip(stages, saved, waiting):
            rows += self._options(work, counts, number, later, exposed)
        # The backward pass does not free the state, layers of other stages, or ones that wait for their weight gradients.
        alone = len(stages) == 1 and not any(waiting) and not self._degrees
        chosen = cheapest(rows, budget, 1 / max(1, saved[0]) if alone else 0.0)
        if chosen is None:
            return None
        options, taken = iter(chosen), list[list[int]]()
        for counts in stages:
            next(options)  # the embedding, or the positions
            taken.append([next(options) for _ in counts.layers])
            if counts.last:
                next(options)
        return [_in_order(counts, each) for counts, each in zip(stages, taken)]

    def _options(
        self, work: RankCosts, counts: PartCounts, live: int, waiting: int, exposed: float
    ) -> list[list[Option]]:
        mesh, state = work.job.mesh, work.job.state
        held = exposed, mesh, state.shard, state.shard_ranks, state.shard_over
        key = counts, live, waiting, mesh.ep, mesh.etp, held if self._degrees else None
        if key not in self._rows:
            columns = [self._parts(counts, strategy) for strategy in self._strategies]
            rows = list[list[Option]]()
            for position, each in enumerate(zip(*columns, strict=True)):
                options = [Option(0.0, live * part.saved + waiting * part.waiting, part.above) for part in each]
                if 0 < position <= counts.blocks:
                    layer = counts.layers[position - 1]
                    rows.append([self._option(work, layer, *both, exposed) for both in zip(self._strategies, options)])
                else:
                    rows.append(options[:1])
            self._rows[key] = rows
        return self._rows[key]

    def _option(self, work: RankCosts, layer: int, strategy: LayerStrategy, option: Option, exposed: float) -> Option:
        kinds = tuple(kind for kind in KINDS if kind in strategy.recompute)
        mesh, collectives = work.job.mesh, work.job.config.recompute_collectives
        key = "recomputed block", layer, kinds, strategy.tensor, mesh.ep, mesh.etp, collectives
        alone = work if strategy.tensor is None else work.with_job(with_degree(work.job, strategy.tensor))
        again = work.cached(key, lambda: sum(terms.seconds for _, terms in recomputed_block(alone, layer, kinds)))
        if strategy.tensor is None:
            return option._replace(seconds=again)
        more = _block_seconds(alone, layer) - _block_seconds(work, layer)
        (moved, bytes_), (before, less) = (_layer_state(each, layer) for each in (alone, work))
        more += exposed * (moved - before) / work.job.microbatches
        return option._replace(seconds=again + more, saved=option.saved + bytes_ - less)


def with_degree(job: Job, degree: int) -> Job:
    """Returns the job with `degree` tensor-parallel ranks in all layers."""
    every = LayersConfig.model_validate({"layers": f"0-{job.model.layers - 1}", "tensor": degree})
    return job.changed(parallel={"layers": [every]})


def _block_seconds(work: RankCosts, layer: int) -> float:
    """Returns the seconds of a microbatch in a block, without recomputation."""
    return sum(times * sum(terms.seconds for terms in passes) for passes, times in work.modules[layer].values())


def _layer_state(work: RankCosts, layer: int) -> tuple[float, float]:
    """Returns the seconds of a step for the collectives and updates of a layer's state, and the state's bytes."""
    counts = PartCounts((layer,), 0, 0, 0, every=0)

    def found() -> tuple[float, float]:
        ((parts, _),) = state_of([(counts,)], work.job)
        return state_seconds(work, counts), sum(parts.values())

    return work.memo(("layer", layer, work.job.microbatches), found)


def _in_order(counts: PartCounts, chosen: Sequence[int]) -> list[int]:
    """Returns the strategies of a stage with those of blocks alike in order, the last strategy first.

    The strategies of the most recomputation come first: their backward pass is the last, when the other blocks' bytes
    are free.
    """
    alike = {layer: sorted(n for at, n in zip(counts.layers, chosen) if at == layer) for layer in {*counts.layers}}
    return [alike[layer].pop() for layer in counts.layers]


def with_strategies(job: Job, strategies: Sequence[LayerStrategy]) -> Job:
    """Returns the job whose layers have `strategies`: the most frequent recomputation is `recompute`, all that differs is a
    range."""
    named = [(tuple(kind for kind in KINDS if kind in each.recompute), each.tensor) for each in strategies]
    ((default, _),) = Counter(kinds for kinds, _ in named).most_common(1)
    layers = list[LayersConfig]()
    for (kinds, tensor), same in groupby(enumerate(named), key=lambda each: each[1]):
        numbers = [layer for layer, _ in same]
        fields: dict[str, Any] = {"recompute": _present(job.model, numbers, kinds)} if kinds != default else {}
        fields |= {"tensor": tensor} if tensor is not None else {}
        if fields:
            where = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
            layers.append(LayersConfig.model_validate({"layers": where} | fields))
    return job.changed(parallel={"layers": layers}, recompute=[*default], recompute_every=1)


def _present(model: Architecture, layers: Sequence[int], kinds: Sequence[str]) -> list[str]:
    """Returns the kinds of modules that some of the layers has, because a configuration refuses all others."""
    feed_forward = {"moe" if model.experts_of(layer) else "mlp" for layer in layers}
    return [kind for kind in kinds if kind in feed_forward or kind not in ("mlp", "moe")]
