"""Facts about a machine, which a run measures or the planner reads from a machine file."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from optimus.comm import Group
from optimus.comm.algorithms import Measured
from optimus.config import RunConfig
from optimus.config.sizes import size_text
from optimus.config.tree import StateConfig
from optimus.measurements import Measurements, Timing, Timings, in_turn
from optimus.mesh import Mesh
from optimus.observe.machine import Bfloat16, bfloat16_of, device_name, free_memory, measurements_of, total_memory
from optimus.optim.adamw import AdamW
from optimus.optim.rule import OptimizerStep, Tile
from optimus.resolve.precision import precision
from optimus.resolve.ranks import ranks_sharing_memory
from optimus.state.buffers import RESIDENCES
from optimus.state.transfers import Transfers, transfers

_ELEMENTS = 1 << 22  # elements of the timed updates and copies
_SQUARE = 4096  # rows and columns of the matrices in the timed matmul
AMOUNTS = {  # bytes, elements or floating-point operations of each timed operation
    "up": 4 * _ELEMENTS,
    "down": 4 * _ELEMENTS,
    "update on host": _ELEMENTS,
    "update on device": _ELEMENTS,
    "product": 2 * _SQUARE**3,
}


@dataclass(frozen=True)
class Facts:
    """Facts about the machine of a run."""

    ranks: int
    ranks_per_node: int
    device: str
    """The type of the device."""
    bfloat16: Bfloat16
    device_bytes: int = 0
    """Bytes of device memory that a rank may fill; 0 if not measured."""
    timings: Timings | None = None
    """Timings of transfers, updates and a matmul, by the keys of `AMOUNTS`; None if not measured.

    Each number is the maximum over the ranks.
    """
    collectives: Measured | None = None
    """Measurements of collectives, or None."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the measurements."""


def measure_facts(
    config: RunConfig,
    device: torch.device,
    mesh: Mesh,
    *,
    previous: Mapping[str, Any],
    world: Group | None = None,
    touches: bool = True,
    collectives: Measured | None = None,
) -> Facts:
    """Returns the facts of this machine.

    With `world`, all ranks of `world` must call the function. Without `world`, the function times nothing.
    """
    native = bfloat16_of(device) if world is None else world.on_first(lambda: bfloat16_of(device))
    per_node = mesh.ranks_per_node or mesh.size
    facts = Facts(mesh.size, per_node, device.type, Bfloat16(*native), collectives=collectives)
    if not counts_memory(config):
        return facts
    known, timings = measurements_of(device, config.tuning.cache), None
    counted, notes = _memory_to_count_on(device, mesh, world, known, touches)
    if opens_offload(config.state) and device.type != "cpu" and world is not None:
        dtype = precision(config, facts.bfloat16, previous).values.get("train.precision", config.train.precision)
        timings = _timings(mesh, world, device, dtype, known, pinned=config.state.pin_memory)
    return replace(facts, device_bytes=counted, timings=timings, notes=(*notes, *known.notes))


def opens_cache(state: StateConfig) -> bool:
    """Returns True if the library has to choose `state.cache`."""
    return state.cache == "auto" or (state.cache is None and RESIDENCES[state.offload][0] != "device")


def opens_offload(state: StateConfig) -> bool:
    """Returns True if the library has to choose an option of offloaded state."""
    return opens_cache(state) or (state.offload != "none" and "auto" in dict(state).values())


def counts_memory(config: RunConfig) -> bool:
    """Returns True if the library has to choose an option by the amount of memory."""
    return (config.recompute == ["auto"] and config.recompute_budget is None) or opens_offload(config.state)


def _memory_to_count_on(
    device: torch.device, mesh: Mesh, world: Group | None, known: Measurements, touches: bool
) -> tuple[int, list[str]]:
    """Returns (device bytes that a rank may fill, lines for the user)."""
    if world is None:
        free = (free_memory if touches or device.type == "cpu" else total_memory)(device)
        counted = known.free_memory(str(device), free)
    else:
        free = min(world.all_gather_object(free_memory(device)))
        counted = world.on_first(lambda: known.free_memory(str(device), free))
    said = f"memory: the run counts on {size_text(counted)} of the {size_text(free)} that are free"
    return counted // ranks_sharing_memory(mesh, device), [said]


def _timings(
    mesh: Mesh, world: Group, device: torch.device, dtype: str, known: Measurements, *, pinned: bool
) -> Timings:
    """Returns the cached timings for this machine and dtype, or measures and caches them."""
    ranks, host = min(mesh.size, mesh.ranks_per_node or mesh.size), device_name(torch.device("cpu"))
    name = (
        f"offload, {ranks} ranks of {torch.get_num_threads()} threads, {host}, {dtype}{'' if pinned else ', unpinned'}"
    )
    found: Timings | None = world.on_first(lambda: known.timings().get(name))
    if found is None or found.keys() != AMOUNTS.keys():
        moves = transfers(device, pinned=pinned)
        measured: Sequence[Timings] = world.all_gather_object(_measured(moves, getattr(torch, dtype)))
        slowest = {what: Timing(*map(max, zip(*(each[what] for each in measured)))) for what in AMOUNTS}
        found = world.on_first(lambda: known.add({name: slowest})[name])
    return found


def _measured(moves: Transfers, dtype: torch.dtype) -> dict[str, Timing]:
    """Measures the seconds of each operation of `AMOUNTS`."""
    host, there = moves.on_host(_ELEMENTS, torch.float32), moves.on_device(_ELEMENTS, torch.float32)
    square = moves.on_device(_SQUARE * _SQUARE, dtype).view(_SQUARE, _SQUARE)
    rule = AdamW(weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)

    def update(make: Callable[[int, torch.dtype], torch.Tensor]) -> Callable[[], object]:
        weight, gradient, *moments = [make(_ELEMENTS, torch.float32) for _ in range(4)]
        return lambda: rule.update(OptimizerStep(1, 1e-4), Tile(weight, gradient, moments))

    works: Sequence[Callable[[], object]] = (
        lambda: moves.up(there, host).wait(),
        lambda: moves.down(host, there).wait(),
        update(moves.on_host),
        update(moves.on_device),
        lambda: torch.mm(square, square),
    )
    return in_turn({what: partial(_seconds, moves, work) for what, work in zip(AMOUNTS, works)})


def _seconds(moves: Transfers, work: Callable[[], object]) -> float:
    moves.synchronize()
    began = time.perf_counter()
    work()
    moves.synchronize()
    return time.perf_counter() - began
