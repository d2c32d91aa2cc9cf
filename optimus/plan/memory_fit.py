"""Chooses sharding, stage placement and activation recomputation so that a layout fits in memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import NamedTuple

from optimus.config import Architecture
from optimus.config.tree import ShardRanks
from optimus.pipeline.estimates import largest
from optimus.plan.candidate_meshes import BlockTiming, Candidate
from optimus.plan.chunks import PartCounts
from optimus.plan.costs import costs_of
from optimus.plan.job import Job
from optimus.plan.layers import Layerwise, stage_parts, strategies_of
from optimus.plan.memory import (
    KINDS,
    ActivationSizes,
    Rank,
    activations_of,
    buffers_of,
    part_counts_of_ranks,
    ranks_of,
    run_activations,
    state_of,
    usable,
)
from optimus.plan.offloading import host_capacity
from optimus.plan.rank_costs import RankCosts
from optimus.plan.step import least_time, step_time
from optimus.resolve.stages import splits_backward
from optimus.state.buffers import RESIDENCES
from optimus.state.plan import Shard

# Shardings that need reduce-scatters or all-gathers in every microbatch.
_FINER = ("gradients", "parameters")


class Timed(NamedTuple):
    """A job, and the seconds of its step."""

    seconds: float
    job: Job


class _Way(NamedTuple):
    """A way to shard the state, and the bytes that the state leaves free, by rank of `Fitting._ranks_of`."""

    shard: Shard
    width: int | ShardRanks | None
    free_bytes: Sequence[float]


class Fitting:
    """Finds jobs that fit in memory, and caches results across candidates."""

    def __init__(self, job: Job, *, layers: bool = False) -> None:
        """Lets the layers of a job have different strategies if `layers` is True."""
        self._layers = layers
        self._layerwise: dict[tuple[BlockTiming, bool], Layerwise] = {}
        self._shares: dict[BlockTiming, float] = {}
        self._machine = job.machine
        self._nodes = job.nodes
        self._ranks: dict[tuple[int | str, ...], list[Rank]] = {}
        self._ways: dict[tuple[object, ...], list[_Way]] = {}
        self._sizes: dict[tuple[BlockTiming, bool, frozenset[str]], ActivationSizes] = {}
        self._buffers: dict[tuple[object, ...], float] = {}
        self._sets = recomputations(job.model)
        profile = job.profile
        self._hides = profile.overlap_data >= profile.overlap_gather and not profile.broadcast

    def least(self, candidate: Candidate) -> float:
        """Returns a lower bound of the step time without recomputation, over all shardings whose state fits.

        Returns infinity if no state fits.
        """
        job, work = candidate.job, candidate.timing.work
        ways = self._ways_of(job)
        enough = {width for shard, width, _ in ways if shard == "optimizer"}
        ways = [way for way in ways if way.width not in enough or not self._is_slower(way.shard, way.width)]
        jobs = (placed for shard, width, _ in ways for placed in placements(held(job, shard, width)))
        least = min((least_time(placed, work) for placed in jobs), default=math.inf)
        return least * self.least_share(candidate)

    def least_share(self, candidate: Candidate) -> float:
        """Returns a lower bound of the step time with fewer tensor-parallel ranks in some layers, relative to the time
        without."""
        if not self._layers:
            return 1.0
        if candidate.timing not in self._shares:
            self._shares[candidate.timing] = self._layerwise_of(candidate).least_share(candidate.timing.work)
        return self._shares[candidate.timing]

    def fastest(self, candidate: Candidate, limit: float) -> Timed | None:
        """Searches shardings, placements and recomputations for the candidate's fastest job that fits in memory.

        Returns None if the search finds no step of less than `limit` seconds.
        """
        best = None
        job = replace(candidate.job, machine=self._machine, nodes=self._nodes)
        # Cached costs assume equal links between nodes.
        work = candidate.timing.work if self._machine.network.links is None else None
        sizes = cache(partial(self._activation_sizes, candidate, job))
        too_slow = set[int | ShardRanks | None]()  # widths too slow with only the optimizer's state sharded
        # By width: the recomputation of the last sharding that fits.
        enough: dict[int | ShardRanks | None, frozenset[str]] = {}

        share = self.least_share(candidate)

        def in_time(jobs: Iterable[Job], share: float = 1.0) -> list[Job]:
            return [placed for placed in jobs if share * least_time(placed, work) < limit]

        for shard, width, free_bytes in self._ways_of(job):
            slower = self._is_slower(shard, width)
            if slower and width in too_slow:
                continue
            plain: Sequence[Job] = in_time(placements(held(job, shard, width)), share)
            jobs = in_time(plain) if share < 1 else plain
            if not plain:
                too_slow |= {width} if shard == "optimizer" else set()
                continue
            buffers = self._buffers_of(plain[0])
            limits = [free - buffers for free in free_bytes]
            recompute, jobs = self._least(jobs, limits, sizes, in_time)
            by_layer = []
            if self._layers and (recompute or not jobs or share < 1):
                by_layer = in_time(self._by_layer(candidate, plain, work, limits))
            elif not jobs or (slower and enough.get(width) == recompute):
                continue
            enough[width] = recompute
            for placed in (*jobs, *by_layer):
                seconds = step_time(placed, work).seconds
                if seconds < limit:
                    best, limit = Timed(seconds, placed), seconds
        return best

    def _by_layer(
        self, candidate: Candidate, jobs: Sequence[Job], work: RankCosts | None, limits: Sequence[float]
    ) -> Iterator[Job]:
        layerwise = self._layerwise_of(candidate)
        known = dict(zip(dict.fromkeys(part_counts_of_ranks(jobs[0])), limits, strict=True))

        def free(job: Job, stages: tuple[PartCounts, ...]) -> float:
            if not job.degrees.ranges:
                return known[stages]
            return free_after_state([stages], job)[0] - buffers_of(job)

        for job in jobs:
            yield from layerwise.fitted(job, work or costs_of(job), free)

    def _layerwise_of(self, candidate: Candidate) -> Layerwise:
        key = candidate.timing, splits_backward(candidate.job.config)
        if key not in self._layerwise:
            self._layerwise[key] = Layerwise(strategies_of(candidate.job, self._sets), stage_parts(candidate.job))
        return self._layerwise[key]

    def _is_slower(self, shard: Shard, width: int | ShardRanks | None) -> bool:
        """True if, with equal recomputation, sharding only the optimizer's state is at least as fast."""
        return self._hides and shard in _FINER and not isinstance(width, ShardRanks)

    def _ways_of(self, job: Job) -> list[_Way]:
        key = job.mesh, job.parallel.stages_per_rank, job.first_last_apart, job.microbatches > 1
        if key not in self._ways:
            ranks = [*dict.fromkeys(part_counts_of_ranks(job))]
            ways = (_Way(*way, free_after_state(ranks, held(job, *way))) for way in sharded(job, layers=self._layers))
            self._ways[key] = [way for way in ways if min(way.free_bytes) > 0]
        return self._ways[key]

    def _buffers_of(self, job: Job) -> float:
        parallel, state = job.parallel, job.state
        key = job.mesh, parallel.schedule, parallel.stages_per_rank, state.shard, state.shard_ranks
        if key not in self._buffers:
            self._buffers[key] = buffers_of(job)
        return self._buffers[key]

    def _ranks_of(self, job: Job) -> list[Rank]:
        """Returns the pipeline's ranks; one rank stands for ranks with the same stages."""
        key = job.parallel.schedule, job.mesh.pp, job.parallel.stages_per_rank, job.microbatches
        if key not in self._ranks:
            merged: dict[tuple[PartCounts, ...], Rank] = {}
            for rank in ranks_of(job):
                live = [*merged[rank.stages].live, *rank.live] if rank.stages in merged else rank.live
                merged[rank.stages] = rank._replace(live=largest(live))
            self._ranks[key] = list(merged.values())
        return self._ranks[key]

    def _least(
        self,
        jobs: Sequence[Job],
        free_bytes: Sequence[float],
        sizes: Callable[[frozenset[str]], list[float]],
        in_time: Callable[[Iterable[Job]], list[Job]],
    ) -> tuple[frozenset[str], Sequence[Job]]:
        """Returns (the cheapest recomputation that fits in time, the jobs with this recomputation that are in time).

        There are no jobs if no recomputation fits in time. `jobs` must already be in time without recomputation.
        Activations fit if their bytes are at most `free_bytes` on each rank.
        """
        slow: list[frozenset[str]] = []
        for recompute in self._sets:
            if any(less <= recompute or "block" in recompute for less in slow):
                continue
            fast = in_time(recomputed(placed, recompute) for placed in jobs) if recompute else [*jobs]
            if not fast:
                slow.append(recompute)
            elif all(size <= free for size, free in zip(sizes(recompute), free_bytes)):
                return recompute, fast
        return frozenset(), []

    def _activation_sizes(self, candidate: Candidate, job: Job, recompute: frozenset[str]) -> list[float]:
        key = candidate.timing, splits_backward(job.config), recompute
        if key not in self._sizes:
            self._sizes[key] = run_activations(job.changed(recompute=[*recompute]))
        return [sum(parts.values()) for parts in activations_of(self._ranks_of(job), self._sizes[key])]


def free_after_state(ranks: Sequence[tuple[PartCounts, ...]], job: Job) -> list[float]:
    """Returns the device bytes that the job's state leaves free, by rank; -inf where the host's memory is too small."""
    capacity, beside = usable(job.machine), host_capacity(job)
    return [
        capacity - sum(parts.values()) if elsewhere.host <= beside else -math.inf
        for parts, elsewhere in state_of(ranks, job)
    ]


def residencies(job: Job) -> Iterator[Job]:
    """Yields the job and, without configured offloading, the job with each `state.offload` that the machine supports.

    A job whose host may accumulate gradients has a second form with `state.accumulate_on: host`.
    """
    yield from _accumulations(job)
    host = job.machine.host
    if job.state.offload == "none" and host.bandwidth is not None and not host.shared:
        for offload in ("optimizer", "all", "disk") if host.read is not None else ("optimizer", "all"):
            yield from _accumulations(job.changed(state={"offload": offload, "resident_fraction": "auto"}))


def _accumulations(job: Job) -> Iterator[Job]:
    yield job
    offloads = RESIDENCES[job.state.offload][1] != "device"
    if offloads and job.state.accumulate_on == "auto" and job.train.global_batch > job.mesh.size:
        yield job.changed(state={"accumulate_on": "host"})


def held(job: Job, shard: Shard, width: int | ShardRanks | None) -> Job:
    """Returns the job with a way to shard the state that `sharded` yields."""
    return job.changed(state={"shard": shard, "shard_ranks": width})


def recomputed(job: Job, recompute: frozenset[str]) -> Job:
    """Returns the job that recomputes the modules `recompute`."""
    return job.changed(recompute=[kind for kind in KINDS if kind in recompute])


def sharded(job: Job, *, layers: bool = False) -> Iterator[tuple[Shard, int | ShardRanks | None]]:
    """Yields the ways to shard the state that the search tries, as (sharding, width).

    A width is a value of `state.shard_ranks`. With `layers`, some layers may have fewer tensor-parallel ranks than the
    mesh, whose others then have the same parameters.
    """
    mesh = job.mesh
    yield "none", None
    fewer = layers and mesh.tp_in == 1 < mesh.tp_out and job.parallel.splits_sequence
    if mesh.stage == mesh.tp and not fewer:
        return
    node = job.machine.ranks_per_node // mesh.tp
    replicas = {mesh.dp, mesh.edp} if job.model.experts else {mesh.dp}

    def divide(*widths: int) -> bool:
        return 1 < widths[-1] < mesh.dp and all(each % min(width, each) == 0 for each in replicas for width in widths)

    for width in [None, node] if divide(node) else [None]:
        yield "optimizer", width
        if job.microbatches > 1:
            yield "gradients", width
        yield "parameters", width
    for near in job.machine.node.nearest(mesh.tp):
        for width in dict.fromkeys((near, node)):
            if width % near == 0 and divide(near, width):
                yield "parameters", ShardRanks(parameters=near, gradients=width)


def placements(job: Job) -> Iterator[Job]:
    """Yields the job and, for some pipelines, the job with another `pipeline_stride`.

    The stride is the smallest that splits no tensor-, context- or expert-parallel group. A pipeline gets the second job
    if this stride is smaller than a stage's number of ranks.
    """
    yield job
    mesh = job.mesh
    least = math.lcm(mesh.cp * mesh.tp, mesh.ep * mesh.etp)
    if mesh.pp > 1 and least < mesh.stage:
        yield job.changed(replace(mesh, pipeline_stride=least))


def recomputations(model: Architecture) -> Sequence[frozenset[str]]:
    """Returns the sets of modules to recompute, cheapest first."""
    if "modules" in model.limits:
        return [frozenset(), frozenset({"block"})]
    feed_forward = frozenset("moe" if model.experts_of(layer) else "mlp" for layer in set(model.alike))
    cost = {frozenset({"norm"}): 1, frozenset({"attention"}): 4, feed_forward: 6}
    sets = [each for count in range(4) for each in combinations(cost, count)]
    ordered = sorted(sets, key=lambda modules: sum(cost[each] for each in modules))
    return [*(frozenset().union(*each) for each in ordered), frozenset({"block"})]
