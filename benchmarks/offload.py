"""Models beyond the device: throughput against all on the device, our choice beside Elixir's rule, and FSDP2's traffic.

The device is simulated (`benchmarks.simulated_device`): our own code moves the bytes, the time is computed. It has room
for the whole state of so many layers; models are 0.5 to 8 times as large. A layer, a chunk of 64 M parameters, takes so long
forward and twice as long backward; a link carries so much each way, the host updates so many elements a second.

Both choose how many blocks of parameters the cache has and how many chunks have their states on the device; the rest of the
step is the same. Ours takes the least cache that hides fetches, then states of the first chunks, then more cache. Elixir's
rule (`search/optimal.py`) compares what a byte of either saves, in a step in which nothing overlaps.

The traffic of FSDP2 with `CPUOffloadPolicy` is counted on one rank of a CPU: what it copies to its device and back, and the
most bytes that its gathered parameters and whole gradients take. There is no device here, so it has no time. FSDP2 sends the
gradients of each microbatch and adds them up on the host; ours of several microbatches is measured both ways, with twice the
layers, too.
"""

import math
import statistics
import sys
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from typer import Option

from benchmarks.harness import Result, Row
from benchmarks.simulated_device import CopyLink, SimulatedDevice, Simulation
from optimus.errors import UserError
from optimus.plan.measure.ranks import run_fresh
from optimus.testing.memory import tracking

SIZES = (0.5, 1, 2, 3, 4, 6, 8)
_WIDTH = 16  # of a layer as it is run
_SCALE = 64e6 / _WIDTH**2  # elements that one of them stands for
_STATE, _PARAMETER = 16, 2  # bytes of an element: all of it, and parameters
_GRADIENTS = 3 * 2  # whole gradients in bf16: one that is made, two on their way to the host
_BLOCKS = 4  # of parameters at least: in use, arriving, and kept for the next use
_ON_DEVICE = 50e9  # elements/s of an update on the device, which Elixir's rule asks for
_STEPS = 3
_TRAFFIC = 12, 64  # layers whose traffic is counted, and their width
_ON_HOST = "ours, gradients added up on the host"


class Machine(NamedTuple):
    """The device has `room` bytes for each element of a chunk; a layer's forward pass takes so many seconds; the link
    carries bytes/s each way, the host updates elements/s."""

    room: int
    forward: float
    link: float
    updates: float


class Choice(NamedTuple):
    """Blocks of the cache and chunks whose whole state is on the device."""

    cache: int
    states: int


def ours(machine: Machine, layers: int) -> Choice:
    """The least cache, then states of the first chunks, then more cache."""
    left = machine.room - _PARAMETER * _BLOCKS - _GRADIENTS
    states = max(0, min(layers, left // _STATE))
    return Choice(min(layers - states, _BLOCKS + (left - states * _STATE) // _PARAMETER), states)


def elixir(machine: Machine, layers: int) -> Choice:
    """Its rule on one rank: cache first, where an element more of it saves more than its memory would, holding states."""
    per_block = 2 * _PARAMETER / machine.link
    per_state = (4 / machine.link + per_block + _PARAMETER / machine.link + 1 / machine.updates - 1 / _ON_DEVICE) / 7
    if per_block <= per_state:
        return ours(machine, layers)
    left = machine.room - _GRADIENTS
    if left < _PARAMETER * layers:
        return Choice(left // _PARAMETER, 0)
    states = min(layers, (left - _PARAMETER * layers) // (_STATE - _PARAMETER))  # which need no block
    return Choice(layers - states, states)


def fewest_loads(layers: int, choice: Choice, microbatches: int = 1) -> int:
    """2 M L - (2 M - 1) C, of the chunks that are fetched."""
    fetched = layers - choice.states
    return 2 * microbatches * fetched - (2 * microbatches - 1) * min(choice.cache, fetched)


def run(
    layers: Annotated[int, Option(help="Layers of 64 M parameters whose whole state the device has room for.")] = 24,
    forward_ms: Annotated[
        float, Option(help="Milliseconds of a layer's forward pass; the backward pass takes two.")
    ] = 20,
    link: Annotated[float, Option(help="GB/s of the link, each way.")] = 25,
    updates: Annotated[float, Option(help="Billion elements/s that the host updates.")] = 2.2,
) -> Result:
    """Rows: each size with our choice and with Elixir's rule; then the traffic of FSDP2 beside ours.

    Ratios: `offload.share_at_3x`, our throughput per layer to that of everything on the device, at 3 times the device;
    `offload.vs_elixir_rule`, to that with its rule, the geometric mean over the sizes that the device has no room for;
    `offload.loads_vs_optimal`, fetches to the fewest that there can be, at most; `offload.fsdp2_bytes_vs_ours`, of a step of
    one microbatch.

    Raises `UserError` for a device that holds too few layers.
    """
    if layers < _BLOCKS:
        raise UserError(f"--layers {layers}: a device that holds fewer than {_BLOCKS} blocks hides no fetch: take more")
    machine = Machine(_STATE * layers, forward_ms / 1e3, link * 1e9, updates * 1e9)
    rows = [
        {"size": size, "contestant": name, **_measure(machine, round(size * layers), rule)}
        for size in SIZES
        for name, rule in {"ours": ours, "Elixir's rule": elixir}.items()
    ]
    best = [row for row in rows if row["contestant"] == "ours"]
    pairs = [(a["share"], b["share"]) for a, b in zip(rows[::2], rows[1::2]) if a["size"] > 1]
    traffic = [row for count in (1, 4) for row in (_our_traffic(count), *run_fresh(_fsdp2_traffic, 1, count))]
    deep = 2 * _TRAFFIC[0]
    traffic += [_our_traffic(4, layers, name) for layers in (deep // 2, deep) for name in ("ours", _ON_HOST)][1:]
    moved = [row["up"] + row["down"] for row in traffic]
    ratios = {
        "offload.share_at_3x": next(row["share"] for row in best if row["size"] == 3),
        "offload.vs_elixir_rule": statistics.geometric_mean(a / b for a, b in pairs),
        "offload.loads_vs_optimal": max(row["loads"] / row["fewest"] for row in best if row["fewest"]),
        "offload.fsdp2_bytes_vs_ours": moved[1] / moved[0],
    }
    tables = {"optimus bench offload": rows, "bytes of an element, in a step": traffic}
    return Result(rows, ratios, {"traffic": traffic}, tables)


def _device(machine: Machine, limit: float = math.inf) -> SimulatedDevice:
    links = [CopyLink(machine.link / _SCALE, 20e-6) for _ in range(2)]
    return SimulatedDevice(*links, limit=limit, update_rate=machine.updates / _SCALE)


def _measure(machine: Machine, layers: int, rule: Callable[[Machine, int], Choice]) -> Row:
    """A step after two others, with what the rule chooses; everything is on the device if there is room for it."""
    fits = layers * _STATE <= machine.room
    choice = Choice(0, layers) if fits else rule(machine, layers)
    options: dict[str, Any] = {"offload": "all", "update_on": "host"}
    options |= {"cache": choice.cache, "resident_fraction": choice.states / layers}
    device = _device(machine, machine.room * _WIDTH**2)
    simulation = Simulation(
        device,
        layers=layers,
        width=_WIDTH,
        forward=machine.forward,
        backward=2 * machine.forward,
        **({} if fits else options),
    )
    last = simulation.run(_STEPS)[-1]
    return {
        "layers": layers,
        "cache": choice.cache,
        "states": choice.states,
        "seconds": last.seconds,
        "share": 3 * machine.forward * layers / last.seconds,
        "loads": last.loads,
        "fewest": fewest_loads(layers, choice),
        "up_gb": last.up * _SCALE / 1e9,
        "down_gb": last.down * _SCALE / 1e9,
        "device_gb": last.peak * _SCALE / 1e9,
        "host_gb": device.host * _SCALE / 1e9,
    }


def _our_traffic(microbatches: int, layers: int = _TRAFFIC[0], name: str = "ours") -> Row:
    width, device = _TRAFFIC[1], _device(Machine(0, 1.0, 1.0, 1.0))
    options: dict[str, Any] = {"offload": "all", "update_on": "host", "cache": _BLOCKS}
    options |= {"accumulate_on": "host" if name == _ON_HOST else "device"}
    last = Simulation(device, layers=layers, width=width, **options).run(_STEPS, microbatches)[-1]
    up, down = (each / layers / width**2 for each in (last.up, last.down))
    return _traffic_row(name, microbatches, layers, up, down, last.peak / width**2)


def _traffic_row(name: str, microbatches: int, layers: int, up: float, down: float, device: float) -> Row:
    """Bytes up and down of an element of the model, and the most on the device for one of a layer."""
    row: Row = {"contestant": name, "microbatches": microbatches, "layers": layers}
    return row | {"up": up, "down": down, "device": device}


def _fsdp2_traffic(microbatches: int) -> Row:
    """On one rank of a CPU. What is copied to or from its device is `Tensor.to`, which copies nothing here."""
    layers, width = _TRAFFIC
    mesh = init_device_mesh("cpu", (1,))
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*net, net):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    moved, original = {"all_gather_inputs": 0, "foreach_reduce": 0}, torch.Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        caller = sys._getframe(1).f_code.co_name
        if caller in moved and args and isinstance(args[0], torch.device):
            moved[caller] += tensor.numel() * tensor.element_size()
        return original(tensor, *args, **kwargs)

    for _ in range(2):  # in the first the gradients of the host are made, which are no memory of the device
        moved.update(dict.fromkeys(moved, 0))
        with patch.object(torch.Tensor, "to", to), tracking() as memory:
            for _ in range(microbatches):
                net(torch.randn(1, width)).square().mean().backward()
    up, down = (each / layers / width**2 for each in moved.values())
    return _traffic_row("FSDP2, CPUOffloadPolicy", microbatches, layers, up, down, memory.peak / width**2)
