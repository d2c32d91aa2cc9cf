"""State that is on the host or a disk: what the run's equations (`state.offload_times`) say of it on a machine."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from optimus.plan.chunks import ChunkGroup
from optimus.plan.job import Job
from optimus.resolve.offload import BLOCKS, step_shape
from optimus.resolve.offload_times import (
    OffloadChoice,
    Rates,
    StepShape,
    UpdatePlace,
    backward_seconds,
    first_pass_seconds,
    pass_seconds,
    step_seconds,
)

# Bytes of an element that an update of AdamW reads and writes: state, and gradient and parameter in 16 bits.
_UPDATE = 28


class OffloadSeconds(NamedTuple):
    """What a step takes longer than its passes: for updates, and for parameters that are fetched."""

    update: float
    fetching: float


def ranks_of_node(job: Job) -> int:
    """Ranks of the job that share a host."""
    return min(job.mesh.size, job.machine.ranks_per_node)


def rates_of(job: Job) -> Rates:
    """Of a rank, all of its node at work."""
    machine, host, ranks = job.machine, job.machine.host, ranks_of_node(job)
    memory = (host.bandwidth or math.inf) / ranks
    link = min(host.link, memory / 2)  # what goes up is read there while what comes down is written
    disks = ((each or math.inf) / ranks for each in (host.read, host.write))
    return Rates(link, link, memory / _UPDATE, machine.memory_bandwidth / _UPDATE, machine.node.bandwidth, *disks)


def device_share(job: Job) -> float:
    """Fraction of the chunks whose state is on the device."""
    share = job.state.resident_fraction
    if job.state.offload == "none":
        return 1.0
    return 0.0 if share == "auto" else share  # what there is room for is added when a layout has been found


def cache_blocks(job: Job, chunks: int) -> int:
    """Of parameters on the device."""
    cache = job.state.cache
    return min(chunks, cache if isinstance(cache, int) else BLOCKS + job.state.prefetch)


def shape_of(job: Job, held: Sequence[ChunkGroup], forward: float, backward: float) -> StepShape:
    """Of a rank that has `held`, whose microbatch takes so many seconds."""
    plans, sizes = [plan for each in held for plan in each.plans], (int(job.itemsize), int(job.profile.gradient))
    whole = job.state.shard != "parameters"
    return step_shape(plans, job.state, job.microbatches, forward, backward, sizes, whole=whole)


def choice_of(job: Job, shape: StepShape, rates: Rates) -> OffloadChoice:
    """As it is configured; the faster place of the update, where that is left open."""
    asked = job.state.update_on
    places: Sequence[UpdatePlace] = ("device", "host") if asked == "auto" else (asked,)
    cache, device = cache_blocks(job, shape.chunks), round(device_share(job) * shape.chunks)
    return min((OffloadChoice(cache, device, on) for on in places), key=lambda each: step_seconds(shape, rates, each))


def offload_seconds(job: Job, held: Sequence[ChunkGroup], forward: float, backward: float) -> OffloadSeconds:
    """Of a step on a rank that has `held`, whose microbatch takes so many seconds."""
    rates, shape = rates_of(job), shape_of(job, held, forward, backward)
    if job.state.shard == "parameters":  # gathered as they are everywhere
        rates = rates._replace(gather=math.inf)
    choice = choice_of(job, shape, rates)
    there = choice.device * shape.elements / shape.shards / rates.device_update
    update = first_pass_seconds(shape, rates, choice) - forward + there
    others = shape.microbatches - 1
    passes = others * (pass_seconds(shape, rates, choice, shape.forward) - forward)
    passes += others * (backward_seconds(shape, rates, choice) - backward)
    passes += pass_seconds(shape, rates, choice, shape.backward) - backward
    return OffloadSeconds(max(0.0, update), max(0.0, passes))


def sends_gradients(job: Job) -> bool:
    """Whether each microbatch's gradients go to the host, to be added up there."""
    return job.state.accumulate_on == "host"


class Elsewhere(NamedTuple):
    """Bytes of a rank on the host, and on a disk."""

    host: float = 0.0
    disk: float = 0.0


def host_room(job: Job) -> float:
    """Bytes of a rank's part of the host's memory that state may take."""
    return 0.9 * job.machine.host.memory / ranks_of_node(job)
