"""Decides the options of offloaded state that are `auto` or null."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from optimus.config.sizes import parse_size, size_text
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.model.count import flops_per_token
from optimus.resolve.decision import Decided
from optimus.resolve.facts import AMOUNTS, opens_cache
from optimus.resolve.memory import account
from optimus.resolve.offload_times import (
    OffloadChoice,
    Rates,
    StepShape,
    UpdatePlace,
    choose,
    step_seconds,
    update_seconds,
)
from optimus.resolve.precision import DTYPES
from optimus.resolve.recompute_choice import recomputed_flops
from optimus.resolve.run import ResolvedRun
from optimus.state.buffers import RESIDENCES, Residency
from optimus.state.plan import ChunkPlan, resident_chunks

_SHARE = 0.9  # share of `device_bytes` that a rank uses
# Minimum number of parameter blocks that the library chooses, besides one block per prefetched chunk. A rank with fewer
# chunks needs only one block per chunk.
BLOCKS = 3
_NO_LINK = Rates(math.inf, math.inf, math.inf, math.inf)  # all choices take the same time


class _DeviceMemory(NamedTuple):
    """Device memory for chunks.

    The parameter blocks and the resident state can fill `free` bytes. A parameter block has `block` bytes and holds the
    unsharded parameters of one chunk. With the state of the first D chunks resident, the device needs `resident[D]`
    more bytes. `cached` chunks share the blocks.
    """

    free: int
    block: int
    resident: Sequence[int]
    cached: int
    least: int  # minimum number of blocks
    unsharded: bool  # True if chunks with resident state need no block


class _Machine(NamedTuple):
    """Rates, the FLOP/s of matmuls, and the largest spread of a measurement."""

    rates: Rates = _NO_LINK
    compute: float = math.inf
    spread: float = 0.0


def placement(run: ResolvedRun) -> Decided:
    """Decides the folder of state on a disk. Without offloading, puts updates and accumulation on the device."""
    state = run.config.state
    if state.offload == "none":
        open_ = [key for key in ("update_on", "accumulate_on") if getattr(state, key) == "auto"]
        return Decided({f"state.{key}": "device" for key in open_}, "all state is on the device", said=False)
    if state.offload == "disk" and state.disk is None:
        return Decided({"state.disk": run.config.train.output}, "the folder of the run")
    return Decided()


def cache_size(run: ResolvedRun) -> Decided:
    """Decides the number of parameter blocks of a cache whose size is given in bytes."""
    size = run.config.state.cache
    if not isinstance(size, str) or size == "auto":
        return Decided()
    block = max(largest_block(run.chunk_plans(rank, 0.0)) for rank in run.stage_ranks)
    if parse_size(size) < block:
        raise UserError(
            f"state.cache {size}: the largest chunk of parameters has {size_text(block)}: give at least {block}B, or choose "
            "a smaller state.chunk or smaller state.chunk_sizes"
        )
    return Decided(
        {"state.cache": blocks_in(size, block)}, f"{size} have room for so many blocks of {size_text(block)}"
    )


def largest_block(plans: Sequence[ChunkPlan]) -> int:
    """Returns the bytes of a parameter block: of the largest chunk that shares the cache; 0 without such a chunk."""
    return max((plan.block for plan in _cached(plans)), default=0)


def blocks_in(size: str, block: int) -> int:
    """Returns the number of parameter blocks of `block` bytes in a cache of a size such as "2GiB", at least 1."""
    return max(1, parse_size(size) // block) if block else 1


def _cached(plans: Sequence[ChunkPlan]) -> list[ChunkPlan]:
    return [plan for plan in plans if plan.lifetime == "cache"]


def accumulation(run: ResolvedRun) -> Decided:
    """Chooses the device or the host for accumulating the gradients of several microbatches."""
    state = run.config.state
    if state.accumulate_on != "auto":
        return Decided()
    if RESIDENCES[state.offload][1] == "device":
        return Decided({"state.accumulate_on": "device"}, "gradients wait on the device for the update")
    if run.microbatches == 1:
        return Decided({"state.accumulate_on": "device"}, "a step has one microbatch")
    if run.facts.device == "cpu":
        return Decided({"state.accumulate_on": "device"}, "on a CPU, device and host have the same memory")
    there = run.with_values({"state.accumulate_on": "device"})
    if all(_fits(there, rank) for rank in there.stage_ranks):
        return Decided({"state.accumulate_on": "device"}, "the device has room for the gradients")
    return Decided({"state.accumulate_on": "host"}, "the device has no room for the gradients of several microbatches")


def _fits(run: ResolvedRun, rank: int) -> bool:
    state = run.config.state
    elsewhere, here = run.chunk_plans(rank, 0.0), run.chunk_plans(rank, 1.0)
    memory = _device_memory(run, rank, elsewhere, here)
    blocks = state.cache if isinstance(state.cache, int) else memory.least
    return blocks * memory.block + memory.resident[_resident(run, rank)] <= memory.free


def _resident(run: ResolvedRun, rank: int) -> int:
    """Returns the number of chunks with resident state; 0 if `state.resident_fraction` is `auto`."""
    return sum(resident_chunks(plans, run.config.state) for plans in run.divided(rank).values())


def residency(run: ResolvedRun) -> Decided:
    """Decides the number of parameter blocks, the fraction of resident state, and the device or host for updates."""
    state = run.config.state
    open_ = {
        "state.resident_fraction": state.resident_fraction == "auto",
        "state.cache": opens_cache(state),
        "state.update_on": state.update_on == "auto",
    }
    if not any(open_.values()):
        return Decided()
    machine = _machine_of(run)
    found = [_choose_for_rank(run, rank, machine) for rank in run.stage_ranks]
    caches = [chosen.cache for _, chosen, _, cached in found if chosen.cache < cached]
    values = {
        "state.resident_fraction": min(share for share, *_ in found),
        # A rank whose chunks all fit into the cache does not limit other ranks.
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


def _choose_for_rank(run: ResolvedRun, rank: int, machine: _Machine) -> tuple[float, OffloadChoice, StepShape, int]:
    """Returns (fraction of the state to keep resident, choice, step shape, number of chunks that share the blocks)."""
    state = run.config.state
    elsewhere, here = run.chunk_plans(rank, 0.0), run.chunk_plans(rank, 1.0)
    memory = _device_memory(run, rank, elsewhere, here)
    shape = _shape(run, here, memory, machine.compute)
    both: tuple[UpdatePlace, ...] = ("device", "host") if run.facts.device != "cpu" else ("host",)
    if state.offload == "none":
        devices = [len(here)]
    elif state.resident_fraction == "auto":
        devices = [*range(len(here) + 1)]
    else:
        devices = [_resident(run, rank)]
    least = int(state.cache) if isinstance(state.cache, int) else memory.least if opens_cache(state) else 0
    found = choose(
        shape,
        machine.rates,
        memory.free,
        memory.block,
        memory.resident,
        caches=range(memory.least, memory.cached + 1) if opens_cache(state) else [least],
        devices=devices,
        update_on=both if state.update_on == "auto" else (state.update_on,),
        spread=machine.spread,
    ) or OffloadChoice(least, devices[0], both[-1])
    share = sum(plan.size for plan in here[: found.device]) / max(1, sum(plan.size for plan in here))
    return share, found, shape, memory.cached


def _why(machine: _Machine, shape: StepShape, found: OffloadChoice) -> str:
    rates = machine.rates
    if math.isinf(rates.up):
        return "as much as fits into memory"
    update = 1 / update_seconds(shape._replace(elements=1, shards=1), rates, found.update_on)
    step = step_seconds(shape, rates, found)
    computing = shape.microbatches * shape.chunks * (shape.forward + shape.backward)
    return (
        f"measured: link {rates.up / 1e9:.3g} GB/s up and {rates.down / 1e9:.3g} down, updates {update / 1e9:.3g} G "
        f"elements/s, spread {machine.spread:.0%}; a step should take {step / computing:.2f} times its computation"
    )


def _device_memory(
    run: ResolvedRun, rank: int, elsewhere: Sequence[ChunkPlan], resident: Sequence[ChunkPlan]
) -> _DeviceMemory:
    """Computes the device memory for chunks.

    `elsewhere` plans the chunks with all state offloaded, and `resident` plans the same chunks with all state resident.
    """
    state = run.config.state
    cached = _cached(elsewhere)
    block = largest_block(elsewhere)
    found = account(run, rank, elsewhere)
    free = int(run.facts.device_bytes * _SHARE) - (found.taken(run.facts) - found.parameters_in_use)
    locations: Sequence[Residency] = ("device", "host") if run.facts.device == "cpu" else ("device",)
    resident_bytes = [0]
    for one, other in zip(resident, elsewhere):
        more = (sum(one.bytes_by_kind(at).values()) - sum(other.bytes_by_kind(at).values()) for at in locations)
        resident_bytes.append(resident_bytes[-1] + sum(more))
    least = min(len(cached), BLOCKS + state.prefetch)
    return _DeviceMemory(
        free, block, resident_bytes, len(cached), least, all(plan.keeps_unsharded for plan in resident)
    )


def _shape(run: ResolvedRun, plans: Sequence[ChunkPlan], memory: _DeviceMemory, compute: float) -> StepShape:
    """Describes a step on a rank that computes `compute` FLOP/s."""
    mesh, train, state = run.mesh, run.widest.train, run.config.state
    tokens = train.micro_batch * train.sequence_length / mesh.cp
    flops = flops_per_token(run.config.model, train.sequence_length) / 3  # of a forward pass
    forward = flops * tokens / (mesh.pp * mesh.tp) / compute
    recomputed = recomputed_flops(run.config.model, run.recomputation, train.sequence_length)
    sizes = DTYPES[train.precision].itemsize, DTYPES[state.gradient_dtype].itemsize
    backward = (2 + recomputed / flops) * forward
    return step_shape(plans, state, run.microbatches, forward, backward, sizes, unsharded=memory.unsharded)


def step_shape(
    plans: Sequence[ChunkPlan],
    state: StateConfig,
    microbatches: int,
    forward: float,
    backward: float,
    sizes: tuple[int, int],
    *,
    unsharded: bool,
) -> StepShape:
    """Describes a step on a rank with the chunks `plans`.

    `forward` and `backward` are the seconds of the two passes of a microbatch. `sizes` are the bytes per element of
    parameters and of gradients.
    """
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
        unsharded,
        state.accumulate_on == "host",
    )
