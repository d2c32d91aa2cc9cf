"""Finds the recomputation of each layer by dynamic programming, for the least time within the memory of each rank.

The layers of a rank and their memory are a knapsack (Galvatron, arXiv 2211.13878): a layer takes one of several strategies,
each with its seconds and its bytes. Strategies differ in recomputation only, so that a border between them costs nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from optimus.config import Architecture
from optimus.config.parallel import LayersConfig
from optimus.parallel.activations import ActivationPart, activation_parts
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.estimates import Live, stages_of_ranks
from optimus.plan.chunks import PartCounts
from optimus.plan.job import Job
from optimus.plan.memory import KINDS, activation_arguments, activations_of, ranks_of, run_activations
from optimus.plan.rank_costs import RankCosts
from optimus.plan.step import blocks_of_stages, counts_of, recomputed_block
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


Parts = Callable[[PartCounts, frozenset[str]], Sequence[ActivationPart]]
"""Returns the activations of a stage's parts with one recomputation of all its blocks."""


def stage_parts(job: Job) -> Parts:
    """Returns a function that computes the activations of the parts of a stage of `job`."""
    shapes = activation_arguments(job)
    known = dict[tuple[PartCounts, frozenset[str]], Sequence[ActivationPart]]()

    def parts(counts: PartCounts, kinds: frozenset[str]) -> Sequence[ActivationPart]:
        if (counts, kinds) not in known:
            chosen = Recomputation(tuple(kind for kind in KINDS if kind in kinds))
            first, last = bool(counts.first), bool(counts.last)
            known[counts, kinds] = activation_parts(
                job.model, chosen, layers=counts.layers, first=first, last=last, **shapes
            )
        return known[counts, kinds]

    return parts


class Layerwise:
    """Finds recomputations by layer for jobs that differ in data parallelism, pipeline and state only."""

    def __init__(self, strategies: Sequence[frozenset[str]], parts: Parts) -> None:
        self._strategies, self._parts = strategies, parts
        self._rows: dict[object, list[list[Option]]] = {}

    def fitted(self, job: Job, work: RankCosts, free: Callable[[tuple[PartCounts, ...]], float]) -> Job | None:
        """Returns the job with the fastest recomputations that fit, or None.

        `job` recomputes nothing. `free` returns the bytes that the state leaves free on a rank with these stages.
        """
        sizes = blocks_of_stages(job)
        counts, numbered = (counts_of(job.model, sizes, numbered=each) for each in (False, True))
        kinds, found = [frozenset[str]()] * job.model.layers, dict[object, list[list[int]] | None]()
        owned = stages_of_ranks(job.parallel.schedule, job.mesh.pp, job.parallel.stages_per_rank)
        for own, lives in zip(owned, live_of(job.config, job.microbatches), strict=True):
            stages = tuple(counts[stage] for stage in own)
            key = stages, tuple(lives)
            if key not in found:
                found[key] = self._chosen(work.with_job(job), stages, lives, free(stages))
            if (chosen := found[key]) is None:
                return None
            for stage, options in zip(own, chosen):
                for layer, option in zip(numbered[stage].numbers, options, strict=True):
                    kinds[layer] = self._strategies[option]
        placed = with_recomputations(job, kinds)
        ranks = ranks_of(placed)
        activations = activations_of(ranks, run_activations(placed))
        free_bytes = (free(tuple(each._replace(start=None) for each in rank.stages)) for rank in ranks)
        return placed if all(sum(parts.values()) <= most for parts, most in zip(activations, free_bytes)) else None

    def _chosen(
        self, work: RankCosts, stages: tuple[PartCounts, ...], lives: Sequence[Live], budget: float
    ) -> list[list[int]] | None:
        """Returns the strategy of each block of each stage of a rank; None if nothing fits."""
        if budget <= 0:
            return None
        saved, waiting = (
            [max(numbers) for numbers in zip(*(getattr(live, name) for live in lives))] for name in Live._fields
        )
        rows = list[list[Option]]()
        for counts, number, later in zip(stages, saved, waiting):
            rows += self._options(work, counts, number, later)
        # Layers of other stages, or ones that wait for their weight gradients, are not freed in the backward pass.
        alone = len(stages) == 1 and not any(waiting)
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

    def _options(self, work: RankCosts, counts: PartCounts, live: int, waiting: int) -> list[list[Option]]:
        job = work.job
        key = counts, live, waiting, job.mesh.ep, job.mesh.etp
        if key not in self._rows:
            columns = [self._parts(counts, kinds) for kinds in self._strategies]
            rows = list[list[Option]]()
            for position, each in enumerate(zip(*columns, strict=True)):
                bytes_ = [(live * part.saved + waiting * part.waiting, part.above) for part in each]
                if 0 < position <= counts.blocks:
                    layer = counts.layers[position - 1]
                    rows.append([Option(self._seconds(work, layer, i), *sizes) for i, sizes in enumerate(bytes_)])
                else:
                    rows.append([Option(0.0, *bytes_[0])])
            self._rows[key] = rows
        return self._rows[key]

    def _seconds(self, work: RankCosts, layer: int, strategy: int) -> float:
        kinds = tuple(kind for kind in KINDS if kind in self._strategies[strategy])
        mesh, collectives = work.job.mesh, work.job.config.recompute_collectives
        key = "recomputed block", layer, kinds, mesh.ep, mesh.etp, collectives
        return work.cached(key, lambda: sum(terms.seconds for _, terms in recomputed_block(work, layer, kinds)))


def _in_order(counts: PartCounts, chosen: Sequence[int]) -> list[int]:
    """Returns the strategies of a stage with those of blocks alike in order, the last strategy first.

    The strategies of the most recomputation come first: their backward pass is the last, when the other blocks' bytes
    are free.
    """
    alike = {layer: sorted(n for at, n in zip(counts.layers, chosen) if at == layer) for layer in {*counts.layers}}
    return [alike[layer].pop() for layer in counts.layers]


def with_recomputations(job: Job, kinds: Sequence[frozenset[str]]) -> Job:
    """Returns the job whose layers recompute `kinds`: the most frequent one is `recompute`, the others are ranges."""
    named = [[kind for kind in KINDS if kind in each] for each in kinds]
    ((default, _),) = Counter(map(tuple, named)).most_common(1)
    layers = [
        LayersConfig.model_validate({"layers": _text(same), "recompute": _present(job.model, same, each)})
        for same, each in _ranges(named)
        if tuple(each) != default
    ]
    return job.changed(parallel={"layers": layers}, recompute=[*default], recompute_every=1)


def _ranges(named: Sequence[list[str]]) -> Iterator[tuple[list[int], list[str]]]:
    for kinds, same in groupby(enumerate(named), key=lambda each: each[1]):
        yield [layer for layer, _ in same], kinds


def _text(layers: Sequence[int]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


def _present(model: Architecture, layers: Sequence[int], kinds: Sequence[str]) -> list[str]:
    """Returns the kinds of modules that some of the layers has, because a configuration refuses all others."""
    feed_forward = {"moe" if model.experts_of(layer) else "mlp" for layer in layers}
    return [kind for kind in kinds if kind in feed_forward or kind not in ("mlp", "moe")]
