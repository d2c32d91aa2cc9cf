"""Estimates a rank's memory for state, activations and communicators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from optimus.model.count import count_parameters
from optimus.parallel.activations import activation_bytes
from optimus.pipeline.estimates import Live, stages_of_ranks
from optimus.plan.chunks import PartCounts, chunk_groups, chunk_plans, held_in, kinds_of, written
from optimus.plan.job import Job
from optimus.plan.machine import Machine
from optimus.plan.offloading import Elsewhere, cache_blocks, device_share
from optimus.plan.step import blocks_of_stages, counts_of
from optimus.resolve.dispatcher import dispatch
from optimus.resolve.facts import opens_cache
from optimus.resolve.groups import Communicators, communicators
from optimus.resolve.memory import fullest_shards, gradients_in_use, parameters_in_use
from optimus.resolve.offload import largest_block
from optimus.resolve.precision import DTYPES
from optimus.resolve.shapes import activation_shapes
from optimus.resolve.stages import live_of
from optimus.state.buffers import Residency
from optimus.state.plan import ChunkPlan

FRAGMENTS = 0.08  # share of a rank's memory that fragmentation wastes
OPTIMIZER = "master", "moments", "mask"  # kinds of buffers that `Memory.parts` adds up as "optimizer"
KINDS = "norm", "attention", "mlp", "moe", "block"  # values of `recompute`, in the configuration's order


ActivationSizes = Callable[[PartCounts], tuple[float, float, float]]
"""Returns the bytes of one microbatch in a stage: (saved from the forward to the backward pass, saved between the two
parts of a split backward pass, transient)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a pipeline rank: on the device by kind, and on the host or disk."""

    rank: int
    parts: Mapping[str, float]
    elsewhere: Elsewhere

    @property
    def total(self) -> float:
        """Total bytes on the device."""
        return sum(self.parts.values())


class Rank(NamedTuple):
    """A rank of the pipeline: the parts of the model in its stages, and the live microbatches at their peaks."""

    stages: tuple[PartCounts, ...]
    live: Sequence[Live]


def memory_of(job: Job, sizes: ActivationSizes | None = None) -> Memory:
    """Returns the memory of the pipeline rank with the most bytes on its device."""
    return max(memory_of_ranks(job, sizes), key=lambda memory: memory.total)


def memory_of_ranks(job: Job, sizes: ActivationSizes | None = None) -> list[Memory]:
    """Returns the memory of each rank of the pipeline."""
    ranks = ranks_of(job)
    states = state_of([rank.stages for rank in ranks], job)
    activations = activations_of(ranks, sizes or run_activations(job))
    return [Memory(rank, state | parts, there) for rank, ((state, there), parts) in enumerate(zip(states, activations))]


def ranks_of(job: Job) -> list[Rank]:
    """Returns the ranks of the pipeline."""
    return [Rank(*both) for both in zip(part_counts_of_ranks(job), live_of(job.config, job.microbatches))]


def part_counts_of_ranks(job: Job) -> list[tuple[PartCounts, ...]]:
    """Returns the parts of the model in the stages of each rank."""
    counts = counts_of(job.model, blocks_of_stages(job), job.degrees, numbered=bool(job.parallel.layers))
    owned = stages_of_ranks(job.parallel.schedule, job.mesh.pp, job.parallel.stages_per_rank)
    return [tuple(counts[number] for number in own) for own in owned]


def state_of(ranks: Sequence[tuple[PartCounts, ...]], job: Job) -> list[tuple[dict[str, float], Elsewhere]]:
    """Returns, for each rank, (bytes on the device by kind, bytes on the host or disk).

    The bytes are those of the state, gathered parameters, gradients in use, checkpoint copies and teachers.
    """
    plans = cache(partial(chunk_plans, job))

    @cache
    def found(stages: tuple[PartCounts, ...]) -> tuple[dict[str, float], Elsewhere]:
        times = [
            _state(job, stages, [plan for counts in held_in(job, stages) for plan in plans(counts, unpruned)])
            for unpruned in (job.config.pruning.shares() if job.config.pruning is not None else [None])
        ]
        device, elsewhere = zip(*times)
        return max(device, key=lambda parts: sum(parts.values())), Elsewhere(*map(max, zip(*elsewhere)))

    return [found(stages) for stages in ranks]


def states_of(job: Job) -> list[tuple[dict[str, float], Elsewhere]]:
    """Returns the result of `state_of` for each rank of the pipeline."""
    return state_of([*part_counts_of_ranks(job)], job)


def state_size(job: Job) -> float:
    """Returns the bytes in `states_of` on the fullest device."""
    return max(sum(parts.values()) for parts, _ in states_of(job))


def activations_of(ranks: Sequence[Rank], sizes: ActivationSizes) -> list[dict[str, float]]:
    """Returns the bytes of activations on each rank, and the transient bytes of a backward pass."""
    parts = []
    for rank in ranks:
        saved, waiting, working = zip(*map(sizes, rank.stages))
        most = max(live.bytes(saved, waiting) for live in rank.live)
        parts.append({"activations": most, "working": max(working)})
    return parts


def _state(job: Job, stages: Sequence[PartCounts], plans: Sequence[ChunkPlan]) -> tuple[dict[str, float], Elsewhere]:
    config, profile, saving = job.config, job.profile, job.config.checkpoint
    locations: Sequence[Residency] = ("device",) if job.state.offload == "none" else ("device", "host", "disk")
    if opens_cache(job.state) or isinstance(job.state.cache, str):
        config = job.changed(state={"cache": cache_blocks(job, len(plans), largest_block(plans))}).config
    copied = teacher = 0.0
    if job.machine.host.shared and saving.asynchronous:  # checkpoint copies are in the ranks' memory
        held = chunk_groups(job, stages)
        copied = device_share(job) * written(held, profile.state_bytes, scattered=saving.scattered)
    if any(counts.last for counts in stages):
        teacher = job.itemsize * sum(count_parameters(model).total for model in job.teachers)
    device, *elsewhere = (fullest_shards(plans, at) for at in locations)
    # A profile may have other bytes per element than the run.
    scale, more = profile.gradient / DTYPES[job.state.gradient_dtype].itemsize, 0.0
    if profile.state is not None:
        here = (plan for plan in plans if plan.rule.trains and not plan.offloaded)
        more = sum((profile.state - 4 * (1 + len(plan.rule.kinds))) * plan.updated for plan in here)
    return {
        "parameters": float(device["parameters"]),
        "gradients": scale * device["gradients"],
        "optimizer": more + sum(device[kind] for kind in OPTIMIZER),
        "gathered": parameters_in_use(config, plans) + scale * gradients_in_use(config, plans, job.microbatches),
        "copies": copied,
        **({"teacher": teacher} if teacher else {}),
    }, Elsewhere(*(float(sum(kinds.values())) for kinds in elsewhere))


def run_activations(job: Job) -> ActivationSizes:
    """Returns a function that computes activation sizes with the job's recomputation."""
    chosen, shapes = job.recomputation, activation_arguments(job)
    ranges = tuple((layers, _counted(kinds)) for layers, kinds in chosen.ranges)
    chosen = chosen._replace(kinds=_counted(chosen.kinds), ranges=ranges)

    @cache
    def sizes(counts: PartCounts) -> tuple[float, float, float]:
        first, last = bool(counts.first), bool(counts.last)
        found = activation_bytes(job.model, chosen, layers=counts.numbers, first=first, last=last, **shapes)
        return float(found.saved), float(found.waiting), float(found.peak - found.saved)

    return sizes


def _counted(kinds: Sequence[str]) -> tuple[str, ...]:
    return tuple(kind for kind in KINDS if kind in kinds)


def activation_arguments(job: Job) -> dict[str, Any]:
    """Returns the arguments of `activation_bytes` that all stages of a job share."""
    config = job.config.decided(dispatch(job.config, job.mesh, job.machine.collectives).values)
    shapes = activation_shapes(config, job.mesh, job.teachers, int(job.itemsize))
    return shapes | {"options": replace(shapes["options"], duplicates=False), "load": job.imbalance}


def usable(machine: Machine) -> float:
    """Returns the bytes of a rank's memory that fragmentation leaves usable."""
    return machine.memory * (1 - FRAGMENTS)


def device_capacity(job: Job) -> float:
    """Returns the bytes of a rank's memory for state and activations."""
    return usable(job.machine) - buffers_of(job)


def communicators_of(job: Job) -> tuple[list[Communicators], float]:
    """Returns (communicators of the rank with the largest buffers, bytes of these buffers).

    The bytes are 0 if `host.shared`.
    """
    config, mesh, machine = job.config, job.mesh, job.machine
    layouts = {str(number): kind.layout for number, kind in enumerate(kinds_of(job).rows)}
    ranks = communicators(config, mesh, layouts, [mesh.block * stage for stage in range(mesh.pp)])
    kind = machine.communicator
    found = [(theirs, sum(each.number * kind.memory(each.size) for each in theirs)) for theirs in ranks]
    connected, bytes_ = max(found, key=lambda each: each[1])
    return connected, 0.0 if machine.host.shared else bytes_


def buffers_of(job: Job) -> float:
    """Returns the maximum bytes of communicators' buffers on a rank; 0 if `host.shared`."""
    return 0.0 if job.machine.host.shared or job.mesh.size == 1 else communicators_of(job)[1]
