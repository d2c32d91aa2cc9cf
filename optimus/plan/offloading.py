"""State that is on the host or a disk: what the run's equations (`state.offload_times`) say of it on a machine."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from optimus.plan.job import Job
from optimus.plan.parameter_groups import ParameterGroup
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
from optimus.state.buffers import buffers
from optimus.state.plan import largest_chunk, placed

# Bytes of an element that an update of AdamW reads and writes: state, and gradient and parameter in 16 bits.
_UPDATE = 28
BLOCKS = 3  # besides those that come ahead of use: the least that a run's `state.cache: auto` takes
GRADIENTS = 3  # whole gradient buffers on their way to the host


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
    share = job.state.device_states
    if job.state.residency == "device":
        return 1.0
    return 0.0 if share == "auto" else share  # what there is room for is added when a layout has been found


def chunk_elements(held: Sequence[ParameterGroup], job: Job) -> float:
    """Of a chunk of what a rank has."""
    total = sum(each.elements for each in held)
    return min(total, job.state.chunk or largest_chunk(round(total)))


def cache_blocks(job: Job, chunks: int) -> int:
    """Of parameters on the device."""
    cache = job.state.cache
    return min(chunks, cache if isinstance(cache, int) else BLOCKS + job.state.prefetch)


def shape_of(job: Job, held: Sequence[ParameterGroup], forward: float, backward: float) -> StepShape:
    """Of a rank that has `held`, whose microbatch takes so many seconds."""
    total, updated = (sum(sizes) for sizes in zip(*((each.elements, each.updated) for each in held)))
    elements = chunk_elements(held, job)
    chunks = max(1, math.ceil(total / elements))
    return StepShape(
        chunks,
        round(total / chunks),
        forward / chunks,
        backward / chunks,
        job.microbatches,
        max(1, round(total / updated)),
        job.state.residency,
        int(job.itemsize),
        int(job.profile.gradient),
        job.state.prefetch,
        job.state.shard != "parameters",
        sends_gradients(job),
    )


def choice_of(job: Job, shape: StepShape, rates: Rates) -> OffloadChoice:
    """As it is configured; the faster place of the update, where that is left open."""
    asked = job.state.update_on
    places: Sequence[UpdatePlace] = ("device", "host") if asked == "auto" else (asked,)
    cache, device = cache_blocks(job, shape.chunks), round(device_share(job) * shape.chunks)
    return min((OffloadChoice(cache, device, on) for on in places), key=lambda each: step_seconds(shape, rates, each))


def offload_seconds(job: Job, held: Sequence[ParameterGroup], forward: float, backward: float) -> OffloadSeconds:
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

    host: float
    disk: float


def elsewhere_of(job: Job, held: Sequence[ParameterGroup]) -> Elsewhere:
    """What a rank that has `held` keeps of it beside its device."""
    away, found = 1 - device_share(job), {"device": 0.0, "host": 0.0, "disk": 0.0}
    types = getattr(torch, job.train.precision), getattr(torch, job.state.gradient_dtype)
    residency, sends = job.state.residency, sends_gradients(job)
    for each in held:
        depths = placed(each.depths, residency, sends)
        for buffer in buffers(depths, *types, each.rule, residency=residency, pruned=each.pruned, sends=sends):
            found[buffer.residency] += away * buffer.bytes(each.after(buffer.depth))
    return Elsewhere(found["host"], found["disk"])


def host_room(job: Job) -> float:
    """Bytes of a rank's part of the host's memory that state may take."""
    return 0.9 * job.machine.host.memory / ranks_of_node(job)
