"""Bytes on a rank, as a search estimates them in microseconds: parameters, gradients and optimizer state by their layouts,
activations by what is recomputed and by how many microbatches the schedule keeps. What a plan says is the account of its run
(`resolve.memory`), by which it must fit.

For this library activations are what `parallel.activations` measures of its own modules; for the frameworks of published
measurements, what `benchmarks.published.activations` counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from optimus.model.count import count_parameters
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.estimates import Live, stages_of_ranks
from optimus.plan.blocks import examples
from optimus.plan.job import Job
from optimus.plan.machine import Machine
from optimus.plan.offloading import (
    GRADIENTS,
    Elsewhere,
    cache_blocks,
    chunk_elements,
    device_share,
    elsewhere_of,
    sends_gradients,
)
from optimus.plan.parameter_groups import ParameterGroup, PartCounts, parameter_groups, written
from optimus.plan.step import blocks_of_stages, counts_of, together
from optimus.resolve.dispatcher import dispatch
from optimus.resolve.groups import Communicators, communicators
from optimus.resolve.parameters import layouts_of
from optimus.resolve.shapes import activation_shapes
from optimus.resolve.stages import live_of
from optimus.state.buffers import RESIDENCES
from optimus.state.masks import MaskPlan

FRAGMENTS = 0.08  # share of a rank's memory that cannot be used
KINDS = "norm", "attention", "mlp", "moe", "block"  # of recomputation, in the configuration's order
_AHEAD = 2  # blocks whose whole parameters, or gradients, are there at a time where they are sharded


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
    """A rank of the pipeline: what its stages hold, together and each, and the microbatches that they keep at most."""

    counts: PartCounts
    stages: Sequence[PartCounts]
    live: Sequence[Live]


def memory_of(job: Job, kept: ActivationSizes | None = None) -> Memory:
    """Of the fullest rank."""
    return max(memory_of_ranks(job, kept), key=lambda memory: memory.total)


def memory_of_ranks(job: Job, kept: ActivationSizes | None = None) -> list[Memory]:
    """Of a rank of each rank of the pipeline. `kept` says what activations take; default: what the run's own do."""
    ranks = ranks_of(job)
    states = state_of([rank.counts for rank in ranks], job)
    activations = activations_of(ranks, kept or run_activations(job))
    return [Memory(rank, state | parts, there) for rank, ((state, there), parts) in enumerate(zip(states, activations))]


def ranks_of(job: Job) -> list[Rank]:
    """The ranks of the pipeline."""
    live = live_of(job.config, job.microbatches)
    return [Rank(together(stages), stages, kept) for stages, kept in zip(stages_of_each(job), live)]


def stages_of_each(job: Job) -> list[list[PartCounts]]:
    """Of each rank of the pipeline what its stages have."""
    counts = counts_of(job.model, blocks_of_stages(job))
    owned = stages_of_ranks(job.parallel.schedule, job.mesh.pp, job.parallel.stages_per_rank)
    return [[counts[number] for number in own] for own in owned]


def state_of(ranks: Sequence[PartCounts], job: Job) -> list[tuple[dict[str, float], Elsewhere]]:
    """Of each rank: what it holds of parameters, gradients and the optimizer's state, on the device and elsewhere."""
    found: dict[PartCounts, tuple[dict[str, float], Elsewhere]] = {}
    for counts in ranks:
        if counts not in found:
            held = parameter_groups(job.when_largest, counts)
            found[counts] = state_parts(held, job, counts), elsewhere_of(job, held)
    return [found[counts] for counts in ranks]


def state_size(job: Job) -> float:
    """Bytes of what the fullest rank holds on its device of parameters, gradients and the optimizer's state."""
    return max(sum(parts.values()) for parts, _ in state_of([rank.counts for rank in ranks_of(job)], job))


def activations_of(ranks: Sequence[Rank], kept: ActivationSizes) -> list[dict[str, float]]:
    """Of each rank: what its activations take, and what a backward pass holds besides."""
    parts = []
    for rank in ranks:
        saved, waiting, working = zip(*map(kept, rank.stages))
        most = max(live.bytes(saved, waiting) for live in rank.live)
        parts.append({"activations": most, "working": max(working)})
    return parts


def state_parts(held: Sequence[ParameterGroup], job: Job, counts: PartCounts) -> dict[str, float]:
    """What is there at rest, copies for checkpoints too, and whole parameters and gradients while they are used."""
    blocks, profile, saving = max(1, counts.blocks), job.profile, job.config.checkpoint
    here = job.machine.host.shared and saving.asynchronous  # copies lie in the ranks' own memory
    copied = written(held, profile.state_bytes, scattered=saving.scattered) if here else 0.0
    home, waiting, _ = RESIDENCES[job.state.residency]
    share = device_share(job)
    parts = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "gathered": 0.0, "copies": share * copied}
    if counts.last and job.teachers:
        parts["teacher"] = job.itemsize * sum(count_parameters(teacher).total for teacher in job.teachers)
    chunk, whole = chunk_elements(held, job), sum(each.elements for each in held)
    if home != "device":
        parts["parameters"] = job.itemsize * share * whole
        parts["gathered"] = job.itemsize * min(whole, chunk * cache_blocks(job, math.ceil(whole / chunk)))
    if waiting != "device":  # gradients of a chunk leave after its last microbatch
        parts["gathered"] += profile.gradient * min(GRADIENTS * chunk, whole)
    for each in held:
        if each.pruned and each.rule.trains:
            parts["optimizer"] += index_bytes(job, each)
        # What is gathered at a time: whole blocks, or chunks of a small model.
        ahead = max(each.elements / blocks * min(_AHEAD, blocks), min(each.elements, (1 + job.state.prefetch) * chunk))
        if each.rule.trains:
            # Parameters are then the master weights.
            same = job.precision == "fp32" and not (each.rule.averages or each.pruned)
            state = profile.state_bytes(each.rule) - (4.0 if same else 0.0)
            parts["optimizer"] += share * state * each.updated
            if waiting == "device" or (job.microbatches > 1 and not sends_gradients(job)):
                parts["gradients"] += profile.gradient * each.after(each.depths.gradients)
        if home != "device":
            continue
        parts["parameters"] += job.itemsize * (
            each.after(each.depths.parameters) if each.depths.parameters else each.elements
        )
        if each.depths.parameters:
            parts["gathered"] += job.itemsize * (ahead if job.state.reshard_after_forward else each.elements)
        if each.rule.trains and (each.depths.gradients or each.pruned):
            parts["gathered"] += profile.gradient * max(ahead / _AHEAD, min(each.elements, chunk))
    return parts


def index_bytes(job: Job, group: ParameterGroup) -> float:
    """Bytes of the masks of a group of which some are pruned: on every rank that has whole gradients of it."""
    assert job.config.pruning is not None
    elements = round(group.elements)
    return float(4 * MaskPlan(elements, round(group.unpruned * elements), job.config.pruning.indices).elements)


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
        layers = [layer for layer, number in counts.kinds for _ in range(number)]
        first, last = bool(counts.first), bool(counts.last)
        found = activation_bytes(job.model, chosen, layers=layers, first=first, last=last, **shapes)
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
