"""Predicts the costs of state on the host or a disk."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from optimus.plan.chunks import ChunkGroup
from optimus.plan.job import Job
from optimus.resolve.offload import BLOCKS, blocks_in, step_shape
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

# Bytes that an update of AdamW reads and writes per element, with gradient and parameter in 16 bits.
_UPDATE = 28


class OffloadSeconds(NamedTuple):
    """Seconds that updates and the fetching of parameters add to the passes of a step."""

    update: float
    fetching: float


def ranks_of_node(job: Job) -> int:
    """Returns the largest number of the job's ranks that share a host."""
    return min(job.mesh.size, job.machine.ranks_per_node)


def rates_of(job: Job) -> Rates:
    """Returns the rates of a rank while all ranks of its node are busy. All-gathers have the rate within a node."""
    machine, host, ranks = job.machine, job.machine.host, ranks_of_node(job)
    memory = (host.bandwidth or math.inf) / ranks
    link = min(host.link, memory / 2)  # both directions share the host memory
    disks = ((each or math.inf) / ranks for each in (host.read, host.write))
    return Rates(link, link, memory / _UPDATE, machine.memory_bandwidth / _UPDATE, machine.node.bandwidth, *disks)


def device_share(job: Job) -> float:
    """Returns the fraction of the elements whose state is on the device.

    The fraction is 1 without offload. With offload, `state.resident_fraction: auto` counts as 0.
    """
    share = job.state.resident_fraction
    if job.state.offload == "none":
        return 1.0
    return 0.0 if share == "auto" else share  # the run decides later


def cache_blocks(job: Job, chunks: int, block: int) -> int:
    """Returns the number of parameter blocks of `block` bytes on the device, at most the number of `chunks`."""
    cache = job.state.cache
    if isinstance(cache, str) and cache != "auto":
        return min(chunks, blocks_in(cache, block))
    return min(chunks, cache if isinstance(cache, int) else BLOCKS + job.state.prefetch)


def shape_of(job: Job, held: Sequence[ChunkGroup], forward: float, backward: float) -> StepShape:
    """Returns the `StepShape` of a rank with the chunks `held`; `forward` and `backward` are a microbatch's seconds."""
    plans, sizes = [plan for each in held for plan in each.plans], (int(job.itemsize), int(job.profile.gradient))
    unsharded = job.state.shard != "parameters"
    return step_shape(plans, job.state, job.microbatches, forward, backward, sizes, unsharded=unsharded)


def choice_of(job: Job, shape: StepShape, rates: Rates) -> OffloadChoice:
    """Returns the configured offload choice. With `state.update_on: auto`, the update is on the faster of device and
    host."""
    asked = job.state.update_on
    options: Sequence[UpdatePlace] = ("device", "host") if asked == "auto" else (asked,)
    block = shape.elements * shape.itemsize
    cache, device = cache_blocks(job, shape.chunks, block), round(device_share(job) * shape.chunks)
    return min((OffloadChoice(cache, device, on) for on in options), key=lambda each: step_seconds(shape, rates, each))


def offload_seconds(job: Job, held: Sequence[ChunkGroup], forward: float, backward: float) -> OffloadSeconds:
    """Returns the seconds that updates and fetching add to the passes of a step, on a rank with the chunks `held`.

    `forward` and `backward` are the seconds of a microbatch's passes.
    """
    rates, shape = rates_of(job), shape_of(job, held, forward, backward)
    if job.state.shard == "parameters":  # the passes include the all-gather
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
    """True if the host accumulates the gradients of each microbatch."""
    return job.state.accumulate_on == "host"


class Elsewhere(NamedTuple):
    """Bytes of a rank's state on the host, and on a disk."""

    host: float = 0.0
    disk: float = 0.0


def host_capacity(job: Job) -> float:
    """Returns the bytes that a rank's state may take on the host: 90 % of an equal part of the host memory."""
    return 0.9 * job.machine.host.memory / ranks_of_node(job)
