"""What of the state is on the device where most is not: as configured, or the fastest that there is room for (`auto`).

On an accelerator the equations of `state.offload_times` choose by what is measured of its link and of updates, by all ranks
at once, and then kept for other runs on such a node. On a processor, which has no link, there is nothing to wait for: memory
alone decides.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.measurements import Timing, Timings, in_turn
from optimus.model.count import flops_per_token
from optimus.observe.machine import device_name, measurements_of
from optimus.optim.adamw import AdamW
from optimus.optim.rule import OptimizerStep, Tile
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation
from optimus.state.buffers import RESIDENCES
from optimus.state.offload_times import OffloadChoice, Rates, StepShape, UpdatePlace, choose, step_seconds
from optimus.state.plan import ChunkPlan, bytes_by_kind
from optimus.state.transfers import Transfers, transfers
from optimus.train.recomputation import activation_shapes

_SHARE = 0.9  # of the free memory
_BLOCKS = 3  # of parameters at least, besides those that come ahead of use: in use, arriving, and kept for its next use
_GRADIENTS = 3  # whole gradient buffers: one that is filled, two on their way to the host
_MEASURED = 1 << 22  # elements of an update and of a copy that are timed
_SQUARE = 4096  # rows and columns of a product that is timed
_NO_LINK = Rates(math.inf, math.inf, math.inf, math.inf)  # all choices take as long
_AMOUNTS = {  # that are done in the seconds of a measurement: bytes, elements, floating point operations
    "up": 4 * _MEASURED,
    "down": 4 * _MEASURED,
    "update on host": _MEASURED,
    "update on device": _MEASURED,
    "product": 2 * _SQUARE**3,
}

Plans = Callable[[RunConfig], Sequence[ChunkPlan]]


class _Room(NamedTuple):
    """Bytes of the device that chunks may take, of a block of parameters, and of the state of the first chunks by their
    number; how many chunks take turns in the blocks, and those that do at least."""

    free: int
    block: int
    kept: Sequence[int]
    cached: int
    least: int
    whole: bool  # chunks whose state is on the device need no block


def with_residency(
    config: RunConfig, groups: Groups, device: torch.device, free: int, plans: Plans
) -> tuple[RunConfig, str | None]:
    """(`config` with all about `state.residency` chosen, what the user should know about the choice).

    `free` bytes of the device are for state and activations of this rank, whose chunks `plans` gives. All ranks must call,
    and find the same.
    """
    state = config.state
    if state.residency == "device" and state.cache != "auto":
        return config, None
    fetches = RESIDENCES[state.residency][0] != "device"
    cache = "auto" if state.cache is None and fetches else state.cache
    disk = state.disk or config.train.output if state.residency == "disk" else None
    config = config.changed(state={"cache": cache, "disk": disk})
    open_places = state.update_on == "auto" and state.residency != "device"
    if not open_places and "auto" not in (cache, state.device_states):
        return config, None
    elsewhere, here = (plans(config.changed(state={"device_states": fraction})) for fraction in (0.0, 1.0))
    room = _room(config, groups, free, elsewhere, here)
    rates, compute, spread, notes = _NO_LINK, math.inf, 0.0, list[str]()
    if device.type != "cpu":
        timings, notes = _timings(config, groups, device)
        *slowest, compute = (amount / timings[what].best for what, amount in _AMOUNTS.items())
        rates, spread = Rates(*slowest), max(each.spread for each in timings.values())
    shape = _shape(config, groups, here, room, compute)
    places: tuple[UpdatePlace, ...] = ("device", "host") if device.type != "cpu" else ("host",)
    if state.residency == "device":
        devices = [len(here)]
    elif state.device_states == "auto":
        devices = [*range(len(here) + 1)]
    else:
        devices = [round(state.device_states * len(here))]
    least = room.least if cache == "auto" else int(cache or 0)
    found = choose(
        shape,
        rates,
        room.free,
        room.block,
        room.kept,
        caches=range(room.least, room.cached + 1) if cache == "auto" else [least],
        devices=devices,
        places=places if state.update_on == "auto" else (state.update_on,),
        spread=spread,
    ) or OffloadChoice(least, devices[0], places[-1])
    share = sum(plan.size for plan in here[: found.device]) / max(1, sum(plan.size for plan in here))
    answers = groups.world.all_gather_object((share, found.cache, found.update_on))
    share, blocks = min(each[0] for each in answers), min(each[1] for each in answers)
    share = share if state.device_states == "auto" else state.device_states
    decided = {
        "device_states": share,
        "cache": max(1, blocks) if cache == "auto" else cache,
        "update_on": answers[0][2] if state.residency != "device" else state.update_on,
    }
    config = config.changed(state=decided)
    return config, "; ".join([_said(config, rates, shape, found, spread), *notes])


def _said(config: RunConfig, rates: Rates, shape: StepShape, found: OffloadChoice, spread: float) -> str:
    state = config.state
    held = f"{state.cache} chunks of parameters at a time and " if state.cache else ""
    note = f"state.residency {state.residency}: the device has {held}{state.device_states:.0%} of the optimizer state"
    if math.isinf(rates.up):
        return note
    update = rates.host_update if found.update_on == "host" else min(rates.up, rates.down) / 12
    step = step_seconds(shape, rates, found)
    computing = shape.microbatches * shape.chunks * (shape.forward + shape.backward)
    return (
        f"{note}, the rest is updated on the {found.update_on} (measured: link {rates.up / 1e9:.3g} GB/s up and "
        f"{rates.down / 1e9:.3g} down, {update / 1e9:.3g} G elements/s, within {spread:.0%}); a step is expected to take "
        f"{step / computing:.2f} times its computation"
    )


def _room(
    config: RunConfig, groups: Groups, free: int, elsewhere: Sequence[ChunkPlan], here: Sequence[ChunkPlan]
) -> _Room:
    """For chunks with their state `elsewhere` or `here`: beside activations, gradients and what is always there."""
    itemsize = torch.finfo(getattr(torch, config.train.precision)).bits // 8
    given = (
        Recomputation()
        if "auto" in config.recompute
        else Recomputation(tuple(config.recompute), config.recompute_every)
    )
    activations = activation_bytes(config.model, given, **activation_shapes(config, groups.mesh, itemsize))
    cached = [plan for plan in elsewhere if plan.lifetime == "cache"]
    largest = max((plan.size for plan in cached), default=0)
    gradient = getattr(torch, config.state.gradient_dtype).itemsize
    accumulated = sum(plan.updated for plan in cached) if _microbatches(config, groups) > 1 else 0
    waiting = gradient * (accumulated + _GRADIENTS * largest)
    free = int(free * _SHARE) - activations.peak * config.parallel.pipeline - waiting
    free -= sum(bytes_by_kind(elsewhere).values())
    kept = [0]
    for one, other in zip(here, elsewhere):
        kept.append(kept[-1] + sum(one.bytes_by_kind().values()) - sum(other.bytes_by_kind().values()))
    least = min(len(cached), _BLOCKS + config.state.prefetch)
    return _Room(free, largest * itemsize, kept, len(cached), least, all(plan.keeps_whole for plan in here))


def _shape(config: RunConfig, groups: Groups, plans: Sequence[ChunkPlan], room: _Room, compute: float) -> StepShape:
    """Of a step on this rank, where it computes so many FLOP/s."""
    mesh, train, state = groups.mesh, config.train, config.state
    tokens = train.micro_batch * train.sequence_length / mesh.cp
    forward = flops_per_token(config.model, train.sequence_length) / 3 * tokens / (mesh.pp * mesh.tp) / compute
    chunks, recomputed = max(1, len(plans)), bool(config.recompute)
    return StepShape(
        chunks,
        sum(plan.size for plan in plans) // chunks,
        forward / chunks,
        (2 + recomputed) * forward / chunks,
        _microbatches(config, groups),
        max((plan.shard_count for plan in plans), default=1),
        state.residency,
        torch.finfo(getattr(torch, train.precision)).bits // 8,
        getattr(torch, state.gradient_dtype).itemsize,
        state.prefetch,
        room.whole,
    )


def _microbatches(config: RunConfig, groups: Groups) -> int:
    return max(1, config.train.global_batch // (groups.mesh.dp * config.train.micro_batch))


def _timings(config: RunConfig, groups: Groups, device: torch.device) -> tuple[Timings, list[str]]:
    """(of what `_AMOUNTS` names the slowest of all ranks, which are at work together, what is wrong with the file of
    measurements): as they were measured before on such nodes, else measured now. All ranks must call."""
    mesh, precision = groups.mesh, config.train.precision
    known = measurements_of(device, config.tuning.cache)
    ranks, host = min(mesh.size, mesh.ranks_per_node or mesh.size), device_name(torch.device("cpu"))
    name = f"offload, {ranks} ranks of {torch.get_num_threads()} threads, {host}, {precision}"
    found = groups.world.on_first(lambda: known.timings().get(name))
    if found is None or found.keys() != _AMOUNTS.keys():
        measured = groups.world.all_gather_object(_measured(transfers(device), getattr(torch, precision)))
        slowest = {what: Timing(*map(max, zip(*(each[what] for each in measured)))) for what in _AMOUNTS}
        found = groups.world.on_first(lambda: known.add({name: slowest})[name])
    return found, known.notes


def _measured(moves: Transfers, dtype: torch.dtype) -> dict[str, Timing]:
    """Seconds of what `_AMOUNTS` names, on an accelerator and its host."""
    host, there = moves.on_host(_MEASURED, torch.float32), moves.on_device(_MEASURED, torch.float32)
    square = moves.on_device(_SQUARE * _SQUARE, dtype).view(_SQUARE, _SQUARE)
    rule = AdamW(weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)

    def update(make: Callable[[int, torch.dtype], torch.Tensor]) -> Callable[[], object]:
        weight, gradient, *moments = [make(_MEASURED, torch.float32) for _ in range(4)]
        return lambda: rule.update(OptimizerStep(1, 1e-4), Tile(weight, gradient, moments))

    works: Sequence[Callable[[], object]] = (
        lambda: moves.up(there, host)(),
        lambda: moves.down(host, there)(),
        update(moves.on_host),
        update(moves.on_device),
        lambda: torch.mm(square, square),
    )
    return in_turn({what: partial(_seconds, moves, work) for what, work in zip(_AMOUNTS, works)})


def _seconds(moves: Transfers, work: Callable[[], object]) -> float:
    moves.synchronize()
    began = time.perf_counter()
    work()
    moves.synchronize()
    return time.perf_counter() - began
