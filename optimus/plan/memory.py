"""Bytes on a rank, as a search estimates them in microseconds: parameters, gradients and optimizer state by their layouts,
activations by what is recomputed and by how many microbatches the schedule keeps. What a plan says is the account of its run
(`resolve.memory`), by which it must fit.

For this library activations are what `parallel.activations` measures of its own modules; for the frameworks of published
measurements, what `benchmarks.published.activations` counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from optimus.model.count import count_parameters
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.estimates import Live, stages_of_ranks
from optimus.plan.blocks import examples
from optimus.plan.chunks import PartCounts, chunk_groups, chunk_plans, held_in, written
from optimus.plan.job import Job
from optimus.plan.machine import Machine
from optimus.plan.offloading import Elsewhere, cache_blocks, device_share
from optimus.plan.step import blocks_of_stages, counts_of
from optimus.resolve.dispatcher import dispatch
from optimus.resolve.facts import opens_cache
from optimus.resolve.groups import Communicators, communicators
from optimus.resolve.memory import fullest_shards, gradients_in_use, parameters_in_use
from optimus.resolve.parameters import layouts_of
from optimus.resolve.precision import DTYPES
from optimus.resolve.shapes import activation_shapes
from optimus.resolve.stages import live_of
from optimus.state.buffers import Residency
from optimus.state.plan import ChunkPlan

FRAGMENTS = 0.08  # share of a rank's memory that cannot be used
OPTIMIZER = "master", "moments", "mask"  # kinds of buffers
KINDS = "norm", "attention", "mlp", "moe", "block"  # of recomputation, in the configuration's order


ActivationSizes = Callable[[PartCounts], tuple[float, float, float]]
"""Bytes of one microbatch in a stage: from its forward to its backward pass, between the two parts of the latter where it is
split, and for a moment besides."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank of the pipeline: on the device by kind, and elsewhere."""

    rank: int
    parts: Mapping[str, float]
    elsewhere: Elsewhere

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


class Rank(NamedTuple):
    """A rank of the pipeline: what each of its stages holds, and the microbatches that they keep at most."""

    stages: tuple[PartCounts, ...]
    live: Sequence[Live]


def memory_of(job: Job, kept: ActivationSizes | None = None) -> Memory:
    """Of the fullest rank."""
    return max(memory_of_ranks(job, kept), key=lambda memory: memory.total)


def memory_of_ranks(job: Job, kept: ActivationSizes | None = None) -> list[Memory]:
    """Of a rank of each rank of the pipeline. `kept` says what activations take; default: what the run's own do."""
    ranks = ranks_of(job)
    states = state_of([rank.stages for rank in ranks], job)
    activations = activations_of(ranks, kept or run_activations(job))
    return [Memory(rank, state | parts, there) for rank, ((state, there), parts) in enumerate(zip(states, activations))]


def ranks_of(job: Job) -> list[Rank]:
    """The ranks of the pipeline."""
    live = live_of(job.config, job.microbatches)
    return [Rank(stages, kept) for stages, kept in zip(stages_of_each(job), live)]


def stages_of_each(job: Job) -> list[tuple[PartCounts, ...]]:
    """Of each rank of the pipeline what its stages have."""
    counts = counts_of(job.model, blocks_of_stages(job))
    owned = stages_of_ranks(job.parallel.schedule, job.mesh.pp, job.parallel.stages_per_rank)
    return [tuple(counts[number] for number in own) for own in owned]


def state_of(ranks: Sequence[tuple[PartCounts, ...]], job: Job) -> list[tuple[dict[str, float], Elsewhere]]:
    """Of each rank: what it holds of parameters, gradients and the optimizer's state, on the device and elsewhere."""
    plans = cache(partial(chunk_plans, job))

    @cache
    def found(stages: tuple[PartCounts, ...]) -> tuple[dict[str, float], Elsewhere]:
        return _state(job, stages, [plan for counts in held_in(job, stages) for plan in plans(counts)])

    return [found(stages) for stages in ranks]


def state_size(job: Job) -> float:
    """Bytes of what the fullest rank holds on its device of parameters, gradients and the optimizer's state."""
    return max(sum(parts.values()) for parts, _ in state_of([rank.stages for rank in ranks_of(job)], job))


def activations_of(ranks: Sequence[Rank], kept: ActivationSizes) -> list[dict[str, float]]:
    """Of each rank: what its activations take, and what a backward pass holds besides."""
    parts = []
    for rank in ranks:
        saved, waiting, working = zip(*map(kept, rank.stages))
        most = max(live.bytes(saved, waiting) for live in rank.live)
        parts.append({"activations": most, "working": max(working)})
    return parts


def _state(job: Job, stages: Sequence[PartCounts], plans: Sequence[ChunkPlan]) -> tuple[dict[str, float], Elsewhere]:
    """Of the chunks of these stages, by the account's rules: what is there at rest, copies for checkpoints too, and whole
    parameters and gradients while they are used; of a run that prunes, when it takes most."""
    config, profile, saving = job.config, job.profile, job.config.checkpoint
    places: Sequence[Residency] = ("device",) if job.state.offload == "none" else ("device", "host", "disk")
    if opens_cache(job.state):
        config = job.changed(state={"cache": cache_blocks(job, len(plans))}).config
    copied = teacher = 0.0
    if job.machine.host.shared and saving.asynchronous:  # copies lie in the ranks' own memory
        held = chunk_groups(job, stages)
        copied = device_share(job) * written(held, profile.state_bytes, scattered=saving.scattered)
    if any(counts.last for counts in stages):
        teacher = job.itemsize * sum(count_parameters(model).total for model in job.teachers)
    device, *elsewhere = (fullest_shards(plans, at) for at in places)
    # Gradients and state of another library take other bytes.
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
    }, Elsewhere(*(float(sum(kept.values())) for kept in elsewhere))


def run_activations(job: Job) -> ActivationSizes:
    """What the run's own modules keep (`parallel.activations`)."""
    kinds = tuple(kind for kind in KINDS if kind in job.recompute)
    chosen = Recomputation(kinds, job.config.recompute_every)
    config = job.config.decided(dispatch(job.config, job.mesh, job.machine.collectives).values)
    shapes = activation_shapes(config, job.mesh, job.teachers, int(job.itemsize))
    # A search also asks for layouts with which duplicates cannot be sent; they are not counted.
    shapes |= {"options": replace(shapes["options"], duplicates=False), "load": job.imbalance}

    @cache
    def sizes(counts: PartCounts) -> tuple[float, float, float]:
        first, last = bool(counts.first), bool(counts.last)
        found = activation_bytes(job.model, chosen, layers=counts.layers, first=first, last=last, **shapes)
        return float(found.saved), float(found.waiting), float(found.peak - found.saved)

    return sizes


def usable(machine: Machine) -> float:
    """Bytes of a rank without what fragments waste."""
    return machine.memory * (1 - FRAGMENTS)


def room_of(job: Job) -> float:
    """Bytes of a rank that state and activations may take: what communicators' buffers take and fragments waste is left
    out."""
    return usable(job.machine) - buffers_of(job)


def communicators_of(job: Job) -> tuple[list[Communicators], float]:
    """(the communicators of the rank whose buffers take most, the bytes of these). On a machine whose ranks compute on the
    host's processors there are no such buffers."""
    config, mesh, machine = job.config, job.mesh, job.machine
    layouts = layouts_of(examples(config.model)[0], config)  # of blocks that are alike one says what all do
    ranks = communicators(config, mesh, layouts, [mesh.block * stage for stage in range(mesh.pp)])
    kind = machine.communicator
    found = [(theirs, sum(each.number * kind.memory(each.size) for each in theirs)) for theirs in ranks]
    connected, bytes_ = max(found, key=lambda each: each[1])
    return connected, 0.0 if machine.host.shared else bytes_


def buffers_of(job: Job) -> float:
    """Bytes of the fullest rank's."""
    return 0.0 if job.machine.host.shared or job.mesh.size == 1 else communicators_of(job)[1]
