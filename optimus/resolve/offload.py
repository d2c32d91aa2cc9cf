"""What of the state is on the device where most is not: as configured, or the fastest that there is room for (`auto`).

On an accelerator the equations of `state.offload_times` choose by what was measured of its link and of updates. On a
processor, which has no link, there is nothing to wait for: memory alone decides. What fits is computed as if nothing were
recomputed, and so is the time of a step: recomputation is chosen afterwards, by what is left.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from optimus.config.tree import StateConfig
from optimus.model.count import flops_per_token
from optimus.resolve.decision import Decided
from optimus.resolve.facts import AMOUNTS, opens_cache
from optimus.resolve.memory import account
from optimus.resolve.offload_times import OffloadChoice, Rates, StepShape, UpdatePlace, choose, step_seconds
from optimus.resolve.precision import DTYPES
from optimus.resolve.run import ResolvedRun
from optimus.state.buffers import RESIDENCES, Residency
from optimus.state.plan import ChunkPlan

_SHARE = 0.9  # of the free memory
BLOCKS = 3  # of parameters at least, besides those that come ahead of use: in use, arriving, and kept for its next use
_NO_LINK = Rates(math.inf, math.inf, math.inf, math.inf)  # all choices take as long


class _Room(NamedTuple):
    """Bytes of the device that chunks may take, of a block of parameters, and of the state of the first chunks by their
    number; how many chunks take turns in the blocks, and those that do at least."""

    free: int
    block: int
    kept: Sequence[int]
    cached: int
    least: int
    whole: bool  # chunks whose state is on the device need no block


class _Machine(NamedTuple):
    """What is known of it: rates, the FLOP/s of products, and how far the measurements scatter."""

    rates: Rates = _NO_LINK
    compute: float = math.inf
    spread: float = 0.0


def places(run: ResolvedRun) -> Decided:
    """The folder of what is on a disk; and where what is left open happens if all state is on the device."""
    state = run.config.state
    if state.offload == "none":
        open_ = [key for key in ("update_on", "accumulate_on") if getattr(state, key) == "auto"]
        return Decided({f"state.{key}": "device" for key in open_}, "all state is there", said=False)
    if state.offload == "disk" and state.disk is None:
        return Decided({"state.disk": run.config.train.output}, "the folder of the run")
    return Decided()


def accumulation(run: ResolvedRun) -> Decided:
    """Where gradients of several microbatches are added up: on the host where the device of some rank has no room for them
    beside the least that it must have. A processor's memory is the device's."""
    state = run.config.state
    if state.accumulate_on != "auto":
        return Decided()
    if RESIDENCES[state.offload][1] == "device":
        return Decided({"state.accumulate_on": "device"}, "they wait there for the update")
    if run.microbatches == 1:
        return Decided({"state.accumulate_on": "device"}, "a step has one microbatch")
    if run.facts.device == "cpu":
        return Decided({"state.accumulate_on": "device"}, "a processor's memory is the device's")
    there = run.with_values({"state.accumulate_on": "device"})
    if all(_has_room(there, rank) for rank in there.stage_ranks):
        return Decided({"state.accumulate_on": "device"}, "it has room for them")
    return Decided({"state.accumulate_on": "host"}, "the device has no room for the gradients of several microbatches")


def _has_room(run: ResolvedRun, rank: int) -> bool:
    state = run.config.state
    elsewhere, here = run.chunk_plans(rank, 0.0), run.chunk_plans(rank, 1.0)
    room = _room(run, rank, elsewhere, here)
    blocks = state.cache if isinstance(state.cache, int) else room.least
    chunks = 0 if state.resident_fraction == "auto" else round(state.resident_fraction * len(here))
    return blocks * room.block + room.kept[chunks] <= room.free


def residency(run: ResolvedRun) -> Decided:
    """The cache of parameters, the state on the device, and where the rest is updated: the fastest that there is room for,
    on the rank of the pipeline that has least."""
    state = run.config.state
    open_ = {
        "state.resident_fraction": state.resident_fraction == "auto",
        "state.cache": opens_cache(state),
        "state.update_on": state.update_on == "auto",
    }
    if not any(open_.values()):
        return Decided()
    machine = _machine_of(run)
    found = [_of_rank(run, rank, machine) for rank in run.stage_ranks]
    caches = [chosen.cache for _, chosen, _, cached in found if chosen.cache < cached]
    values = {
        "state.resident_fraction": min(share for share, *_ in found),
        # A rank whose chunks are all in the cache limits no other that has more of them.
        "state.cache": max(1, min(caches, default=max(chosen.cache for _, chosen, *_ in found))),
        "state.update_on": found[0][1].update_on,
    }
    return Decided({key: values[key] for key in values if open_[key]}, _why(machine, found[0][2], found[0][1]))


def _machine_of(run: ResolvedRun) -> _Machine:
    timings = run.facts.timings
    if timings is None:
        return _Machine()
    *rates, compute = (amount / timings[what].best for what, amount in AMOUNTS.items())
    return _Machine(Rates(*rates), compute, max(each.spread for each in timings.values()))


def _of_rank(run: ResolvedRun, rank: int, machine: _Machine) -> tuple[float, OffloadChoice, StepShape, int]:
    """(share of the state on the device, what is chosen, the step it is chosen for, chunks that take turns in the cache)."""
    state = run.config.state
    elsewhere, here = run.chunk_plans(rank, 0.0), run.chunk_plans(rank, 1.0)
    room = _room(run, rank, elsewhere, here)
    shape = _shape(run, here, room, machine.compute)
    both: tuple[UpdatePlace, ...] = ("device", "host") if run.facts.device != "cpu" else ("host",)
    if state.offload == "none":
        devices = [len(here)]
    elif state.resident_fraction == "auto":
        devices = [*range(len(here) + 1)]
    else:
        devices = [round(state.resident_fraction * len(here))]
    least = int(state.cache) if isinstance(state.cache, int) else room.least if opens_cache(state) else 0
    found = choose(
        shape,
        machine.rates,
        room.free,
        room.block,
        room.kept,
        caches=range(room.least, room.cached + 1) if opens_cache(state) else [least],
        devices=devices,
        places=both if state.update_on == "auto" else (state.update_on,),
        spread=machine.spread,
    ) or OffloadChoice(least, devices[0], both[-1])
    share = sum(plan.size for plan in here[: found.device]) / max(1, sum(plan.size for plan in here))
    return share, found, shape, room.cached


def _why(machine: _Machine, shape: StepShape, found: OffloadChoice) -> str:
    rates = machine.rates
    if math.isinf(rates.up):
        return "what there is room for"
    update = rates.host_update if found.update_on == "host" else min(rates.up, rates.down) / 12
    step = step_seconds(shape, rates, found)
    computing = shape.microbatches * shape.chunks * (shape.forward + shape.backward)
    return (
        f"measured: link {rates.up / 1e9:.3g} GB/s up and {rates.down / 1e9:.3g} down, {update / 1e9:.3g} G elements/s, "
        f"within {machine.spread:.0%}; a step is expected to take {step / computing:.2f} times its computation"
    )


def _room(run: ResolvedRun, rank: int, elsewhere: Sequence[ChunkPlan], here: Sequence[ChunkPlan]) -> _Room:
    """For chunks with their state `elsewhere` or `here`: beside all that the account has but whole parameters."""
    state = run.config.state
    cached = [plan for plan in elsewhere if plan.lifetime == "cache"]
    block = max((plan.block for plan in cached), default=0)
    found = account(run, rank, elsewhere)
    free = int(run.facts.device_bytes * _SHARE) - (found.taken(run.facts) - found.parameters_in_use)
    places: Sequence[Residency] = ("device", "host") if run.facts.device == "cpu" else ("device",)
    kept = [0]
    for one, other in zip(here, elsewhere):
        more = (sum(one.bytes_by_kind(at).values()) - sum(other.bytes_by_kind(at).values()) for at in places)
        kept.append(kept[-1] + sum(more))
    least = min(len(cached), BLOCKS + state.prefetch)
    return _Room(free, block, kept, len(cached), least, all(plan.keeps_whole for plan in here))


def _shape(run: ResolvedRun, plans: Sequence[ChunkPlan], room: _Room, compute: float) -> StepShape:
    """Of a step on this rank, where it computes so many FLOP/s."""
    mesh, train, state = run.mesh, run.widest.train, run.config.state
    tokens = train.micro_batch * train.sequence_length / mesh.cp
    forward = flops_per_token(run.config.model, train.sequence_length) / 3 * tokens / (mesh.pp * mesh.tp) / compute
    recomputed = run.config.recompute not in ([], ["auto"])
    sizes = DTYPES[train.precision].itemsize, DTYPES[state.gradient_dtype].itemsize
    backward = (2 + recomputed) * forward
    return step_shape(plans, state, run.microbatches, forward, backward, sizes, whole=room.whole)


def step_shape(
    plans: Sequence[ChunkPlan],
    state: StateConfig,
    microbatches: int,
    forward: float,
    backward: float,
    sizes: tuple[int, int],
    *,
    whole: bool,
) -> StepShape:
    """A step on a rank with these chunks, whose microbatch takes so many seconds; `sizes` are bytes of a parameter and of a
    gradient."""
    chunks = max(1, len(plans))
    return StepShape(
        chunks,
        sum(plan.size for plan in plans) // chunks,
        forward / chunks,
        backward / chunks,
        microbatches,
        max((plan.shard_count for plan in plans), default=1),
        state.offload,
        *sizes,
        state.prefetch,
        whole,
        state.accumulate_on == "host",
    )
