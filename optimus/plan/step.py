"""Predicts the seconds of a training step, term by term.

The time of all passes follows from the pipeline schedule and the times of the stages. The time of a step is this time
plus the times that collectives over replicas, the optimizer, fetches of offloaded parameters, data and checkpoints add.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

from optimus.comm.algorithms import CollectiveKind
from optimus.config import Architecture
from optimus.mesh.strided import StridedGroup
from optimus.optim.rule import Rule
from optimus.parallel.degrees import SAME_DEGREES, TensorDegrees, layer_kinds
from optimus.pipeline.estimates import StageTimes, least_seconds, pipeline_seconds, stages_of_ranks
from optimus.plan.chunks import ChunkGroup, PartCounts, chunk_groups, max_load, written
from optimus.plan.collectives import transfer_seconds
from optimus.plan.costs import costs_of
from optimus.plan.job import Job
from optimus.plan.offloading import OffloadSeconds, offload_seconds, sends_gradients
from optimus.plan.rank_costs import Passes, RankCosts, Terms, add
from optimus.resolve import stages as of_run

# Terms of a step beside the passes.
_OUTSIDE = "data_parallel", "optimizer", "fetching", "data", "checkpoint"
# Share of the overlapped time by which collectives slow computation.
_CONTENTION = 0.2
_TOKEN = 8  # bytes of each token that a rank copies to its device
_DIVERGENCE = 33 * 4  # bytes that `kernels.linear_divergence` moves for each logit, with one teacher


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and the terms on which the slowest rank spends the time."""

    seconds: float
    terms: Mapping[str, float]


class PartTime(NamedTuple):
    """Seconds of a step that the slowest rank spends in a part of the step.

    `part` is a kind of module, or what else the rank works on; `work` is `compute`, or the kind of parallelism whose
    exposed collectives these are.
    """

    part: str
    pass_: str  # forward, recompute, backward or step
    work: str
    seconds: float


class _Stage(NamedTuple):
    """Seconds of a microbatch in a stage."""

    forward: Terms
    backward: Terms
    weights: Terms
    again: Terms  # recomputation, part of the backward pass
    starting: float  # launches of kernels by the host, for layers with experts
    gathers: float = 0.0  # from `_gathering`

    @property
    def host(self) -> float:
        """Seconds that the device waits for the host."""
        busy = self.gathers + sum(each.seconds for each in (self.forward, self.backward, self.weights, self.again))
        return max(0.0, self.starting - busy)

    @property
    def times(self) -> StageTimes:
        """The stage's times for `pipeline.estimates`."""
        besides = (self.gathers + (self.host if self.starting else 0.0)) / 2
        return StageTimes(
            self.forward.seconds + besides, self.backward.seconds + self.again.seconds + besides, self.weights.seconds
        )


class _Passes(NamedTuple):
    """Times of the stages' passes, and the stages of the slowest rank."""

    stages: Sequence[_Stage]  # of the slowest rank
    stage_times: Sequence[StageTimes]  # of the slowest rank
    times: tuple[StageTimes, ...]  # of all stages
    held: tuple[PartCounts, ...]  # parts of the model on the slowest rank
    least: float  # lower bound of the seconds of all passes, if ranks share no cores


def step_time(job: Job, work: RankCosts | None = None) -> StepTime:
    """Predicts the time of a job's step.

    `work` may be the costs of another job, within the limits of `RankCosts.with_job`.
    """
    work = work.with_job(job) if work else costs_of(job)
    passes, mesh = _passes(work), job.mesh
    order = job.parallel.schedule, mesh.pp, job.microbatches, passes.times
    link = 0.0 if mesh.pp == 1 else transfer_seconds(work.R * work.H * work.e, job.group("pp"), work.machine)
    blocking, warmup_factor = job.profile.blocking, job.parallel.warmup_factor
    of_passes = pipeline_seconds(*order, link, blocking=blocking, warmup_factor=warmup_factor)
    seconds = _lent(work, passes.times, of_passes)
    return _sum(work, passes.stages, seconds, _other_terms(work, passes, seconds))


def part_times(job: Job) -> list[PartTime]:
    """Returns the predicted seconds of the parts of a job's step; the sum is `step_time(job).seconds`.

    The seconds may be 0. The output layer has no backward pass, because it finds its gradients in the forward pass.
    """
    work = costs_of(job)
    passes, m, found = _passes(work), job.microbatches, defaultdict[tuple[str, str, str], float](float)
    step = step_time(job, work)
    for stage, counts in zip(passes.stages, passes.held):
        for part, times, number in _parts(work, counts):
            names = 3 * ("forward",) if part == "head" else ("forward", "backward", "backward")
            for name, terms in zip(names, times):
                for kind, seconds in _works(terms):
                    found[part, name, kind] += m * number * seconds
        for part, terms in _recomputed_parts(work, counts):
            for kind, seconds in _works(terms):
                found[part, "recompute", kind] += m * seconds
        found["host", "step", "launches"] += m * stage.host
        if stage.gathers:
            forward, backward = stage.forward, add([stage.backward, stage.weights])
            gathered, reduced = _gathering(work, counts, forward, backward)
            found["parameters", "step", "gathering"] += m * gathered
            found["gradients", "step", "reduction"] += m * reduced
    busy, of_passes = sum(found.values()), step.seconds - sum(step.terms[name] for name in _OUTSIDE)
    found = defaultdict(float, {key: min(1.0, of_passes / busy) * seconds for key, seconds in found.items()})
    moved = work.memo(("state", passes.held), lambda: _state_seconds(work, passes.held))
    reduced, gathered = _reduction(work, moved, passes.stage_times)
    found["gradients", "step", "reduction"] += reduced
    found["parameters", "step", "gathering"] += gathered
    others = {
        ("optimizer", "update"): "optimizer",
        ("parameters", "fetching"): "fetching",
        ("pipeline", "waiting"): "pipeline",
        ("data", "copy"): "data",
        ("checkpoint", "writing"): "checkpoint",
    }
    for (part, kind), term in others.items():
        if term != "pipeline" or job.mesh.pp > 1:  # else the rounding of the sum
            found[part, "step", kind] += step.terms[term]
    return [PartTime(*key, seconds) for key, seconds in found.items()]


def _works(terms: Terms) -> Iterator[tuple[str, float]]:
    yield "compute", terms.compute
    yield from (("tensor", terms.tensor), ("context", terms.context), ("expert", terms.expert))


def least_time(job: Job, work: RankCosts | None = None) -> float:
    """Returns a lower bound of `step_time` in seconds.

    The bound may fail if asynchronous checkpoints of both kinds, full and weights alone, take longer than their
    intervals.
    """
    work = work.with_job(job) if work else costs_of(job)
    passes = _passes(work)
    least = _lent(work, passes.times, passes.least)
    return least + sum(_other_terms(work, passes, least).values())


def _passes(work: RankCosts) -> _Passes:
    job, mesh, state, parallel = work.job, work.job.mesh, work.job.state, work.job.parallel
    release = state.reshard_after_forward
    gathers = (mesh, state.shard_ranks, state.shard_over, release) if state.shard == "parameters" else None
    inside = mesh.ep, mesh.etp, job.degrees, job.recomputation, job.config.recompute_collectives
    order = parallel.schedule, mesh.pp, parallel.stages_per_rank, job.microbatches, parallel.vocabulary
    key = inside, gathers, order, tuple(parallel.layers_per_stage or ())
    return work.cached(key, lambda: _all_passes(work, inside))


def _all_passes(work: RankCosts, inside: tuple[Any, ...]) -> _Passes:
    job, pp, parallel, forms = work.job, work.job.mesh.pp, work.job.parallel, inside[:3]
    sizes = blocks_of_stages(job)
    numbered = bool(parallel.layers)
    counts = counts_of(job.model, sizes, job.degrees, numbered=numbered)
    vocabulary = parallel.stages_per_rank if parallel.vocabulary else None
    alike, ranks, owned = _alike(job.model, sizes, job.degrees, parallel.schedule, pp, numbered)
    stages: dict[int, _Stage] = {}
    for number in dict.fromkeys(alike):
        each = counts[number]
        stage = work.cached((forms, vocabulary, each), partial(_stage, work, each))
        if job.recomputation:
            again = work.cached((inside, each), partial(_recomputed, work, each))
            stage = stage._replace(again=again)
        if job.state.shard == "parameters":
            passes = stage.forward, add([stage.backward, stage.weights])
            stage = stage._replace(gathers=sum(_gathering(work, each, *passes)))
        stages[number] = stage
    unlike = {number: stage.times for number, stage in stages.items()}
    times, seconds = tuple([unlike[number] for number in alike]), {n: each.seconds for n, each in unlike.items()}
    of_rank = {own: sum([seconds[number] for number in own]) for own in owned}
    slowest = max(of_rank, key=of_rank.__getitem__)
    least = least_seconds(parallel.schedule, job.microbatches, times, [of_rank[own] for own in ranks])
    slow, own = zip(*((stages[number], unlike[number]) for number in slowest))
    return _Passes(slow, own, times, owned[slowest], least)


@lru_cache(maxsize=1024)
def _alike(
    model: Architecture, sizes: tuple[int, ...], degrees: TensorDegrees, schedule: str, pp: int, numbered: bool
) -> tuple[tuple[int, ...], list[tuple[int, ...]], dict[tuple[int, ...], tuple[PartCounts, ...]]]:
    """Groups stages with equal parts of the model; the first such stage represents the group.

    Returns three values: the representative of each stage, each rank's tuple of representatives, and the parts of the
    model for each such tuple.
    """
    first, counts = dict[PartCounts, int](), counts_of(model, sizes, degrees, numbered=numbered)
    alike = tuple(first.setdefault(each, number) for number, each in enumerate(counts))
    ranks = [tuple(alike[stage] for stage in own) for own in stages_of_ranks(schedule, pp, len(sizes) // pp)]
    return alike, ranks, {own: tuple(counts[number] for number in own) for own in dict.fromkeys(ranks)}


def _lent(work: RankCosts, times: Sequence[StageTimes], seconds: float) -> float:
    job, machine = work.job, work.machine
    if machine.alone == 1 or job.group("pp").nodes(machine.ranks_per_node) > 1:
        return seconds
    return max(sum(each.seconds for each in times) * job.microbatches / job.mesh.pp, seconds / machine.alone)


def _other_terms(work: RankCosts, passes: _Passes, seconds: float) -> dict[str, float]:
    job, stages = work.job, passes.held
    moved = work.memo(("state", stages), lambda: _state_seconds(work, stages))
    beside = OffloadSeconds(moved.update, 0.0)
    if job.state.offload != "none":
        held = _held(work, stages)
        forward, backward = (
            sum(times) for times in zip(*((t.forward, t.backward + t.weights) for t in passes.stage_times))
        )
        beside = offload_seconds(job, held, forward, backward)
    reduced, gathered = _reduction(work, moved, passes.stage_times)
    others = {
        "data_parallel": reduced + gathered,
        "optimizer": beside.update - _beside_reduction(work, stages, reduced, beside.update),
        "fetching": beside.fetching,
        "data": job.tokens / job.mesh.dp * _TOKEN / work.machine.host.link,
    }
    return others | {"checkpoint": _saving(work, moved.written, seconds + sum(others.values()))}


@lru_cache(maxsize=1024)
def stage_sizes(model: Architecture, stages: int, *, divided: bool = False) -> tuple[int, ...]:
    """Returns the number of blocks of each stage in a run.

    With `divided`, all stages share the embedding and the output layer.
    """
    return tuple(len(blocks) for blocks in of_run.blocks_of_stages(model, stages, divided=divided))


def blocks_of_stages(job: Job) -> tuple[int, ...]:
    """Returns the number of blocks of each stage: as configured, or as a run divides the blocks."""
    return tuple(job.parallel.layers_per_stage or stage_sizes(job.model, job.stages, divided=job.parallel.vocabulary))


@lru_cache(maxsize=1024)
def counts_of(
    model: Architecture, sizes: tuple[int, ...], degrees: TensorDegrees = SAME_DEGREES, *, numbered: bool = False
) -> tuple[PartCounts, ...]:
    """Returns the parts of the model in each stage, for stages of `sizes` blocks, `numbered` for `parallel.layers`."""
    alike, starts = iter(layer_kinds(model, degrees)), accumulate(sizes, initial=0)
    stages = []
    for stage, (size, start) in enumerate(zip(sizes, starts)):
        first, last = int(stage == 0), int(stage == len(sizes) - 1)
        own = tuple(islice(alike, size))
        stages.append(PartCounts(own, first, last, max(first, last), start=start if numbered else None))
    return tuple(stages)


# ---- A microbatch in a stage ----


def _stage(work: RankCosts, counts: PartCounts) -> _Stage:
    experts = (counts.count_at(layer) for layer in work.modules if work.model.experts_of(layer))
    starting, parts = sum((work.profile.host * number for number in experts), 0.0), [*_parts(work, counts)]
    forward, backward, weights = (add(_scaled(passes[i], times) for _, passes, times in parts) for i in range(3))
    return _Stage(forward, backward, weights, Terms(), starting)


def _parts(work: RankCosts, counts: PartCounts) -> Iterator[tuple[str, Passes, float]]:
    """Yields the kinds of modules of a stage: (name, passes of one module, number of modules)."""
    parallel = work.job.parallel
    for layer, modules in work.modules.items():
        if number := counts.count_at(layer):
            yield from ((name, passes, times * number) for name, (passes, times) in modules.items())
    if parallel.vocabulary:
        yield "embedding", work.embedding, 1 / parallel.stages_per_rank
        yield "head", work.head, 1 / parallel.stages_per_rank
    else:
        yield "embedding", work.embedding, counts.first
        yield "head", work.head, counts.last
        yield "norm", work.norm, counts.last
    if work.job.teachers and counts.last:
        yield "teacher", work.cached("teacher", lambda: _teaching(work)), 1


def _teaching(work: RankCosts) -> Passes:
    job, elsewhere = work.job, 1 - 1 / work.job.mesh.cp  # share of a sequence's tokens on other ranks
    traffic = _DIVERGENCE * work.T * job.model.vocab
    seconds = work.head.forward.seconds + work.machine.memory_seconds(traffic) / work.profile.speed
    alone = replace(job.undivided, imbalance=1.0, teachers=())
    for teacher in job.teachers:
        costs, (counts,) = costs_of(alone.changed(model=teacher)), counts_of(teacher, (teacher.layers,))
        seconds += _stage(costs, counts).forward.seconds - elsewhere * costs.head.forward.seconds
    return Passes(*(Terms(teacher=each) for each in (seconds, work.head.backward.seconds, work.head.weights.seconds)))


def _recomputed(work: RankCosts, counts: PartCounts) -> Terms:
    return add(terms for _, terms in _recomputed_parts(work, counts))


def _recomputed_parts(work: RankCosts, counts: PartCounts) -> Iterator[tuple[str, Terms]]:
    chosen = work.job.recomputation
    if chosen:
        numbers = Counter((layer, *chosen.of_layer(number)) for layer, number in zip(counts.layers, counts.numbers))
        for (layer, kinds, every), number in numbers.items():
            share = number / (every if "block" not in kinds else 1)
            yield from ((part, _scaled(terms, share)) for part, terms in recomputed_block(work, layer, kinds))


def recomputed_block(work: RankCosts, layer: int, kinds: Sequence[str]) -> Iterator[tuple[str, Terms]]:
    """Yields the recomputed parts of one block and their seconds. `layer` is a key of `work.modules`."""
    modules = work.modules[layer]
    if "products" in kinds:
        both = add(_scaled(passes.forward, times) for passes, times in modules.values())
        yield "products", Terms(matmul=0.5 * both.matmul, memory=both.memory)
    parts = {**modules, **work.inside(layer)}
    for kind in modules if "block" in kinds else [each for each in kinds if each in parts]:
        (forward, *_), times = parts[kind]
        if work.job.config.recompute_collectives == "keep":
            forward = forward._replace(tensor=0.0, context=0.0, expert=0.0)
        yield kind, _scaled(forward, times)


def _scaled(terms: Terms, times: float) -> Terms:
    return Terms(*(time * times for time in terms))


def _gathering(work: RankCosts, counts: PartCounts, forward: Terms, backward: Terms) -> tuple[float, float]:
    """Returns the seconds that all-gathers of parameters, and reduce-scatters of gradients, add to a microbatch in a
    stage."""
    profile = work.profile
    gather, reduce = work.memo(("gathers", counts), lambda: _gathers(work, counts))
    again = gather if work.job.state.reshard_after_forward else 0.0
    share = profile.overlap_gather * work.machine.overlap
    second = _beside(again + reduce, share * backward.compute)
    reduced = second * reduce / (again + reduce) if reduce else 0.0
    return _beside(gather, share * forward.compute) + second - reduced, reduced


def _gathers(work: RankCosts, counts: PartCounts) -> tuple[float, float]:
    parts = max(1, work.profile.gathers * counts.blocks)
    held = chunk_groups(work.job, (counts,))
    gather = (_moving(work, "all_gather", each.moved(0, each.depths.parameters), work.e, parts) for each in held)
    reduce = (
        _moving(work, "reduce_scatter", each.moved(0, _reduce_depth(work.job, each)), work.profile.reduced, parts)
        for each in held
        if each.rule.trains
    )
    return sum(gather), sum(reduce)


def _reduce_depth(job: Job, group: ChunkGroup) -> int:
    return group.depths.optimizer if sends_gradients(job) else group.depths.gradients


def _moving(
    work: RankCosts, kind: CollectiveKind, moved: Iterable[tuple[float, StridedGroup]], size: float, parts: int = 1
) -> float:
    return sum(parts * work.collective(kind, elements * size / parts, group) for elements, group in moved)


def _beside(moving: float, computing: float) -> float:
    """Returns the seconds that collectives add to overlapping computation: exposed time, and slowdown."""
    return max(0.0, moving - computing) + _CONTENTION * min(moving, computing)


# ---- Parameters, gradients, optimizer and checkpoints ----


class _StateSeconds(NamedTuple):
    """Seconds of a rank's collectives and update outside the passes, without overlap, and the bytes of checkpoints."""

    microbatch_reduce: float  # per microbatch
    reduce: float  # once a step
    gather: float  # all-gather of updated parameters
    turns: float  # broadcasts of updated parameters, one rank after another
    update: float
    written: Sequence[tuple[int, float]]  # checkpoints: (interval in steps, bytes)


def _state_seconds(work: RankCosts, stages: Sequence[PartCounts]) -> _StateSeconds:
    profile, saving = work.profile, work.job.config.checkpoint
    every = chunk_groups(work.job, stages)
    held = [each for each in every if each.rule.trains]
    microbatch_reduce = reduce = gather = turns = 0.0
    for each in held:
        parameters, optimizer, gradients = each.depths.parameters, each.depths.optimizer, _reduce_depth(work.job, each)
        if not parameters:  # else `_gathering` counts the reduce-scatters
            microbatch_reduce += _moving(work, "reduce_scatter", each.moved(0, gradients), profile.reduced)
            turns += profile.broadcast * each.shards(optimizer) if optimizer else 0.0
        reduce += _moving(work, "reduce_scatter", each.moved(gradients, optimizer), profile.reduced)
        copies = work.collective("all_reduce", each.updated * profile.reduced, each.replica_group, profile.reduced)
        reduce, microbatch_reduce = (
            (reduce, microbatch_reduce + copies) if sends_gradients(work.job) else (reduce + copies, microbatch_reduce)
        )
        gather += _moving(work, "all_gather", each.moved(parameters, optimizer), work.e)

    def weight(rule: Rule) -> float:  # bytes per element of `Chunk.weights`
        return 4.0 if rule.averages else work.e

    kinds = (saving.every, profile.state_bytes), (saving.weights_every, weight)
    files = [(steps, written(every, size, scattered=saving.scattered)) for steps, size in kinds if steps is not None]
    return _StateSeconds(microbatch_reduce, reduce, gather, turns, _update(work, held), files)


def state_seconds(work: RankCosts, counts: PartCounts) -> float:
    """Returns the seconds of a step for the collectives of a stage's parameters and gradients, without overlap, and for its
    update."""
    moved, m = _state_seconds(work, (counts,)), work.job.microbatches
    gathered = sum(_gathers(work, counts)) if work.job.state.shard == "parameters" else 0.0
    return m * (moved.microbatch_reduce + gathered) + moved.reduce + moved.gather + moved.turns + moved.update


def _reduction(work: RankCosts, moved: _StateSeconds, times: Sequence[StageTimes]) -> tuple[float, float]:
    """Returns the seconds that the reduction of gradients, and all-gathers of updated parameters, add to the passes."""
    job, profile = work.job, work.profile
    hidden, ahead = sum(each.backward + each.weights for each in times), sum(each.forward for each in times)
    if job.state.shard == "gradients":
        hidden *= job.microbatches
    hidden, ahead = (work.machine.overlap * seconds for seconds in (hidden, ahead))
    reduced = _beside(job.microbatches * moved.microbatch_reduce + moved.reduce, profile.overlap_data * hidden)
    return reduced, moved.turns + _beside(moved.gather, profile.overlap_gather * ahead)


def _held(work: RankCosts, stages: Sequence[PartCounts]) -> Sequence[ChunkGroup]:
    return work.memo(("held", stages), lambda: chunk_groups(work.job, stages))


def _beside_reduction(work: RankCosts, stages: Sequence[PartCounts], reduced: float, update: float) -> float:
    """Returns the seconds of the update that run while the `reduced` seconds of reductions do, where nothing is
    clipped.

    With p pieces, reductions of r seconds and updates of u seconds take r + u + (p - 1) max(r, u) (AxoNN, section
    3.3.3). Hence min(r, u) is hidden p - 1 times.
    """
    job, state = work.job, work.job.state
    if job.config.optimizer.clip_norm is not None or not state.overlap or state.offload != "none":
        return 0.0
    held = [each for each in _held(work, stages) if each.rule.trains]
    tiles = state.all_reduce_tiles
    pieces = sum(len(each.plans) if tiles is None else -(-each.updated // (tiles * state.tile)) for each in held)
    return (pieces - 1) / pieces * min(reduced, update) if pieces else 0.0


def _update(work: RankCosts, held: Sequence[ChunkGroup]) -> float:
    profile = work.profile
    elements_by_bytes = defaultdict[float, float](float)  # key: bytes of state per element
    for each in held:
        elements_by_bytes[profile.state_bytes(each.rule)] += each.updated
    own = sum(elements_by_bytes.values())
    moved = sum(profile.update * elements * size for size, elements in elements_by_bytes.items())
    ways = profile.host_traffic * own / work.machine.host.link
    products = sum(_orthogonalising(work, each) for each in held if each.matrices)
    return ways + products + work.machine.memory_seconds(moved + own * profile.gradient, kernels=10)


def _orthogonalising(work: RankCosts, held: ChunkGroup) -> float:
    ranks, each = held.shards(held.depths.optimizer), list[tuple[float, float]]()
    here = -(-round(sum(number for number, *_ in held.matrices)) // ranks)
    for number, together, rows, columns, axes, blocks in held.matrices:
        in_tile = int(work.job.state.tile * blocks / (rows * columns))
        at_once = max(1, min(here, max(in_tile, blocks)) if blocks > 1 else min(together, here, in_tile))
        seconds = work.orthogonalise(-(-at_once // blocks), rows, columns)
        if blocks > 1:
            sent = at_once * rows * columns / blocks * work.e
            seconds += 2 * work.collective("all_to_all", sent, work.job.group(*axes))
        each.append((number, seconds / at_once))
    return max_load(each, ranks)


def _saving(work: RankCosts, files: Iterable[tuple[int, float]], step: float) -> float:
    """Returns the seconds that checkpoints add to a step on average. `files` are pairs (interval in steps, bytes)."""
    machine, asynchronous = work.machine, work.job.config.checkpoint.asynchronous
    seconds = 0.0
    for every, own in files:
        writing = own * machine.ranks_per_node / machine.host.storage
        beside = every * step if asynchronous else 0.0
        seconds += (own / machine.host.link + max(0.0, writing - beside)) / every
    return seconds


# ---- Sum of the terms ----


def _sum(work: RankCosts, stages: Sequence[_Stage], passes: float, others: Mapping[str, float]) -> StepTime:
    m = work.job.microbatches
    every = add(_scaled(terms, m) for each in stages for terms in (each.forward, each.backward, each.weights))
    again = add(_scaled(each.again, m) for each in stages)
    gathers, host = (m * sum(times) for times in zip(*((each.gathers, each.host) for each in stages)))
    busy = every.seconds + again.seconds + gathers + host
    terms = {
        "matmul": every.matmul,
        "attention": every.attention,
        "memory_bound": every.memory,
        "recomputation": again.seconds,
        "tensor_parallel": every.tensor,
        "context_parallel": every.context,
        "expert_parallel": every.expert,
        "teacher": every.teacher,
        "parameter_gathering": gathers,
        "host": host,
    }
    faster = min(1.0, passes / busy)  # less than 1 if ranks share cores
    terms = {name: seconds * faster for name, seconds in terms.items()} | {
        "pipeline": max(0.0, passes - busy),
        **others,
    }
    return StepTime(passes + sum(others.values()), terms)
