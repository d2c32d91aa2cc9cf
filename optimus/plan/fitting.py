"""Of a way to divide the work: how the state is held, where the stages lie and what is recomputed so that it fits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from optimus.config import ModelConfig
from optimus.config.tree import ShardRanks
from optimus.pipeline.estimates import largest
from optimus.plan.divisions import Candidate, Division
from optimus.plan.job import Job
from optimus.plan.memory import KINDS, Rank, RunActivations, activations_of, ranks_of, room_of, stages_of_each, state_of
from optimus.plan.parameter_groups import kinds_of
from optimus.plan.prediction import Plan, predict
from optimus.plan.step import least_time, together
from optimus.state.plan import Shard

# What these reduce or gather for every microbatch, sharding the optimizer's state alone moves once: beside the last backward
# pass and the next forward pass, which are as long as those beside which it would be moved for a microbatch.
_FINER = ("gradients", "parameters")


class Fitting:
    """Finds what fits, and remembers what jobs have in common."""

    def __init__(self, job: Job) -> None:
        self._machine = job.machine
        self._nodes = job.nodes
        self._ranks: dict[tuple[int | str, ...], list[Rank]] = {}
        self._states: dict[tuple[object, ...], list[float]] = {}
        self._kept: dict[tuple[Division, frozenset[str]], RunActivations] = {}
        self._modules = recomputable(job.model)
        self._sets = recomputations(job.model)
        profile = job.profile
        self._hides = profile.overlap_data >= profile.overlap_gather and not profile.broadcast

    def fastest(self, candidate: Candidate, limit: float) -> Plan | None:
        """The fastest sharding, placement of stages and recomputation with which `candidate` fits, if a step takes less than
        `limit` seconds."""
        best = None
        job = replace(candidate.job, machine=self._machine, nodes=self._nodes)
        work = candidate.division.work if self._machine.network.links is None else None  # that knows no links
        taken: dict[frozenset[str], list[float]] = {}
        enough: dict[int | ShardRanks | None, frozenset[str]] = {}  # of what less sharding recomputed, by width
        for shard, width in sharded(job):
            recompute = self._least(candidate, job, self._room(job, shard, width), taken)
            if recompute is None or (shard in _FINER and self._hides and enough.get(width) == recompute):
                continue
            enough[width] = recompute
            if candidate.bound + self._again(candidate, job, recompute) >= limit:
                continue
            fitting = held(job, shard, width).changed(recompute=[kind for kind in KINDS if kind in recompute])
            for placed in placements(fitting):
                if least_time(placed, work) < limit:
                    plan = predict(placed, work)
                    if plan.step.seconds < limit:
                        best, limit = plan, plan.step.seconds
        return best

    def _room(self, job: Job, shard: Shard, width: int | ShardRanks | None) -> list[float]:
        """Bytes that its state leaves of each rank of `_ranks_of`."""
        key = job.mesh, job.parallel.stages_per_rank, job.ends_apart, shard, width
        if key not in self._states:
            sharding = held(job, shard, width)
            unlike = {tuple(map(id, stages)): stages for stages in stages_of_each(sharding)}
            states = state_of([together(stages) for stages in unlike.values()], kinds_of(sharding), sharding)
            room = room_of(job.machine)
            self._states[key] = [room - sum(parts.values()) for parts in states]
        return self._states[key]

    def _ranks_of(self, job: Job) -> list[Rank]:
        """Of ranks whose stages are alike one, which keeps what any of them does."""
        key = job.parallel.schedule, job.mesh.pp, job.parallel.stages_per_rank, job.microbatches
        if key not in self._ranks:
            merged: dict[tuple[int, ...], Rank] = {}
            for rank in ranks_of(job):
                name = tuple(map(id, rank.stages))
                live = [*merged[name].live, *rank.live] if name in merged else rank.live
                merged[name] = rank._replace(live=largest(live))
            self._ranks[key] = list(merged.values())
        return self._ranks[key]

    def _again(self, candidate: Candidate, job: Job, recompute: frozenset[str]) -> float:
        """What recomputation adds to the bound, as no rank has fewer blocks than that."""
        times = zip(self._modules, candidate.division.forward, strict=True)
        seconds = sum(time for kinds, time in times if "block" in recompute or kinds <= recompute)
        fewest = min(rank.counts["blocks"] for rank in self._ranks_of(job))
        return candidate.microbatches * fewest * seconds

    def _least(
        self, candidate: Candidate, job: Job, room: Sequence[float], taken: dict[frozenset[str], list[float]]
    ) -> frozenset[str] | None:
        """What to recompute, the cheapest, so that activations take no more than `room` of each rank; None if too little."""

        def fits(recompute: frozenset[str]) -> bool:
            if recompute not in taken:
                parts = activations_of(self._ranks_of(job), self._activations(candidate, job, recompute))
                taken[recompute] = [sum(each.values()) for each in parts]
            return all(size <= free for size, free in zip(taken[recompute], room))

        if min(room) <= 0 or not any(map(fits, self._sets[-2:])):  # those that leave least
            return None
        return next(filter(fits, self._sets))

    def _activations(self, candidate: Candidate, job: Job, recompute: frozenset[str]) -> RunActivations:
        key = candidate.division, recompute
        if key not in self._kept:
            self._kept[key] = RunActivations(job.changed(recompute=[*recompute]))
        return self._kept[key]


def held(job: Job, shard: Shard, width: int | ShardRanks | None) -> Job:
    """The job with its state sharded so."""
    return job.changed(state={"shard": shard, "shard_ranks": width})


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


def recomputable(model: ModelConfig) -> tuple[frozenset[str], ...]:
    """What is recomputed together: norms, attention, and whatever feed-forward layers there are."""
    feed_forward = frozenset("moe" if model.experts_of(layer) else "mlp" for layer in set(model.alike))
    return frozenset({"norm"}), frozenset({"attention"}), feed_forward


def recomputations(model: ModelConfig) -> Sequence[frozenset[str]]:
    """Sets of modules, those that cost least first."""
    cost = dict(zip(recomputable(model), (1, 4, 6)))
    sets = [each for count in range(4) for each in combinations(cost, count)]
    ordered = sorted(sets, key=lambda modules: sum(cost[each] for each in modules))
    return [*(frozenset().union(*each) for each in ordered), frozenset({"block"})]
