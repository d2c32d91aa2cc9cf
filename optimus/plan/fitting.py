"""Of a way to divide the work: how the state is held, where the stages lie and what is recomputed so that it fits."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import NamedTuple

from optimus.config import ModelConfig
from optimus.config.tree import ShardRanks
from optimus.pipeline.estimates import largest
from optimus.plan.chunks import PartCounts
from optimus.plan.divisions import BlockTiming, Candidate
from optimus.plan.job import Job
from optimus.plan.memory import (
    KINDS,
    ActivationSizes,
    Rank,
    activations_of,
    buffers_of,
    ranks_of,
    run_activations,
    stages_of_each,
    state_of,
    usable,
)
from optimus.plan.offloading import host_room
from optimus.plan.step import least_time, step_time
from optimus.resolve.stages import splits_backward
from optimus.state.buffers import RESIDENCES
from optimus.state.plan import Shard

# What these reduce or gather for every microbatch, sharding the optimizer's state alone moves once: beside the last backward
# pass and the next forward pass, which are as long as those beside which it would be moved for a microbatch.
_FINER = ("gradients", "parameters")


class Timed(NamedTuple):
    """A job, and what its step takes."""

    seconds: float
    job: Job


class _Way(NamedTuple):
    """To hold the state, and the bytes that it leaves of each rank of `Fitting._ranks_of` and of communicators' buffers."""

    shard: Shard
    width: int | ShardRanks | None
    room: Sequence[float]


class Fitting:
    """Finds what fits, and remembers what jobs have in common."""

    def __init__(self, job: Job) -> None:
        self._machine = job.machine
        self._nodes = job.nodes
        self._ranks: dict[tuple[int | str, ...], list[Rank]] = {}
        self._ways: dict[tuple[object, ...], list[_Way]] = {}
        self._kept: dict[tuple[BlockTiming, bool, frozenset[str]], ActivationSizes] = {}
        self._buffers: dict[tuple[object, ...], float] = {}
        self._sets = recomputations(job.model)
        profile = job.profile
        self._hides = profile.overlap_data >= profile.overlap_gather and not profile.broadcast

    def least(self, candidate: Candidate) -> float:
        """Seconds that a step takes at least, if nothing is recomputed, in the ways to hold the state that leave memory."""
        job, work = candidate.job, candidate.division.work
        ways = self._ways_of(job)
        enough = {width for shard, width, _ in ways if shard == "optimizer"}
        ways = [way for way in ways if way.width not in enough or not self._is_slower(way.shard, way.width)]
        places = (placed for shard, width, _ in ways for placed in placements(held(job, shard, width)))
        return min((least_time(placed, work) for placed in places), default=math.inf)

    def fastest(self, candidate: Candidate, limit: float) -> Timed | None:
        """The fastest sharding, placement of stages and recomputation with which `candidate` fits, if a step takes less than
        `limit` seconds."""
        best = None
        job = replace(candidate.job, machine=self._machine, nodes=self._nodes)
        work = candidate.division.work if self._machine.network.links is None else None  # that knows no links
        sizes = cache(partial(self._activation_sizes, candidate, job))
        too_slow = set[int | ShardRanks | None]()  # widths of the optimizer's state alone
        enough: dict[int | ShardRanks | None, frozenset[str]] = {}  # of what less sharding recomputed, by width

        def in_time(places: Iterable[Job]) -> list[Job]:
            return [placed for placed in places if least_time(placed, work) < limit]

        for shard, width, room in self._ways_of(job):
            slower = self._is_slower(shard, width)
            if slower and width in too_slow:
                continue
            places: Sequence[Job] = in_time(placements(held(job, shard, width)))
            if not places:
                too_slow |= {width} if shard == "optimizer" else set()
                continue
            buffers = self._buffers_of(places[0])
            recompute, places = self._least(places, [free - buffers for free in room], sizes, in_time)
            if not places or (slower and enough.get(width) == recompute):
                continue
            enough[width] = recompute
            for placed in places:
                seconds = step_time(placed, work).seconds
                if seconds < limit:
                    best, limit = Timed(seconds, placed), seconds
        return best

    def _is_slower(self, shard: Shard, width: int | ShardRanks | None) -> bool:
        """Whether sharding the optimizer's state alone over as many ranks is as fast, if no more is recomputed then."""
        return self._hides and shard in _FINER and not isinstance(width, ShardRanks)

    def _ways_of(self, job: Job) -> list[_Way]:
        """The ways to hold its state that leave memory."""
        key = job.mesh, job.parallel.stages_per_rank, job.ends_apart, job.microbatches > 1
        if key not in self._ways:
            ranks = [*dict.fromkeys(stages_of_each(job))]
            ways = (_Way(*way, state_room(ranks, held(job, *way))) for way in sharded(job))
            self._ways[key] = [way for way in ways if min(way.room) > 0]
        return self._ways[key]

    def _buffers_of(self, job: Job) -> float:
        """Bytes that its communicators' buffers take."""
        parallel, state = job.parallel, job.state
        key = job.mesh, parallel.schedule, parallel.stages_per_rank, state.shard, state.shard_ranks
        if key not in self._buffers:
            self._buffers[key] = buffers_of(job)
        return self._buffers[key]

    def _ranks_of(self, job: Job) -> list[Rank]:
        """Of ranks whose stages are alike one, which keeps what any of them does."""
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
        places: Sequence[Job],
        room: Sequence[float],
        sizes: Callable[[frozenset[str]], list[float]],
        in_time: Callable[[Iterable[Job]], list[Job]],
    ) -> tuple[frozenset[str], Sequence[Job]]:
        """(what to recompute, those of `places` that are in time with it): the cheapest with which activations take no more
        than `room` of each rank; no places if nothing is. `sizes` takes longest to say."""
        slow: list[frozenset[str]] = []
        for recompute in self._sets:
            if any(less <= recompute or "block" in recompute for less in slow):
                continue
            fast = in_time(recomputed(placed, recompute) for placed in places) if recompute else [*places]
            if not fast:
                slow.append(recompute)
            elif all(size <= free for size, free in zip(sizes(recompute), room)):
                return recompute, fast
        return frozenset(), []

    def _activation_sizes(self, candidate: Candidate, job: Job, recompute: frozenset[str]) -> list[float]:
        """Bytes on each rank of `_ranks_of`."""
        key = candidate.division, splits_backward(job.config), recompute
        if key not in self._kept:
            self._kept[key] = run_activations(job.changed(recompute=[*recompute]))
        return [sum(parts.values()) for parts in activations_of(self._ranks_of(job), self._kept[key])]


def state_room(ranks: Sequence[tuple[PartCounts, ...]], job: Job) -> list[float]:
    """Bytes that its state leaves of the device of each of `ranks`; none where the host has no room for it."""
    room, beside = usable(job.machine), host_room(job)
    return [
        room - sum(parts.values()) if elsewhere.host <= beside else -math.inf
        for parts, elsewhere in state_of(ranks, job)
    ]


def residencies(job: Job) -> Iterator[Job]:
    """The job with its state where it may be, what is fastest first: on the device, then on the host of a machine whose host
    is known to have memory, then on its disks; as configured, where that is elsewhere than on the device. Where gradients
    are added up is tried likewise: on the device, then on the host."""
    yield from _accumulations(job)
    host = job.machine.host
    if job.state.offload == "none" and host.bandwidth is not None and not host.shared:
        for offload in ("optimizer", "all", "disk") if host.read is not None else ("optimizer", "all"):
            yield from _accumulations(job.changed(state={"offload": offload, "resident_fraction": "auto"}))


def _accumulations(job: Job) -> Iterator[Job]:
    """The job, and with the gradients of several microbatches, if there may be some, on the host."""
    yield job
    leaves = RESIDENCES[job.state.offload][1] != "device"
    if leaves and job.state.accumulate_on == "auto" and job.train.global_batch > job.mesh.size:
        yield job.changed(state={"accumulate_on": "host"})


def held(job: Job, shard: Shard, width: int | ShardRanks | None) -> Job:
    """The job with its state sharded so."""
    return job.changed(state={"shard": shard, "shard_ranks": width})


def recomputed(job: Job, recompute: frozenset[str]) -> Job:
    """The job with that recomputed."""
    return job.changed(recompute=[kind for kind in KINDS if kind in recompute])


def sharded(job: Job) -> Iterator[tuple[Shard, int | ShardRanks | None]]:
    """All ways to hold the state: the levels, over all replicas (None) and over those of a node; and parameters over those
    ranks of a node that are nearest to each other, gradients over these or the node's, the rest over all."""
    mesh = job.mesh
    yield "none", None
    if mesh.stage == mesh.tp:
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
    """All of a stage together, or stages as near as the groups in them allow."""
    yield job
    mesh = job.mesh
    least = math.lcm(mesh.cp * mesh.tp, mesh.ep * mesh.etp)
    if mesh.pp > 1 and least < mesh.stage:
        yield job.changed(replace(mesh, pipeline_stride=least))


def recomputations(model: ModelConfig) -> Sequence[frozenset[str]]:
    """Sets of modules, those that cost least first: of norms, attention and whatever feed-forward layers there are; or whole
    blocks."""
    feed_forward = frozenset("moe" if model.experts_of(layer) else "mlp" for layer in set(model.alike))
    cost = {frozenset({"norm"}): 1, frozenset({"attention"}): 4, feed_forward: 6}
    sets = [each for count in range(4) for each in combinations(cost, count)]
    ordered = sorted(sets, key=lambda modules: sum(cost[each] for each in modules))
    return [*(frozenset().union(*each) for each in ordered), frozenset({"block"})]
