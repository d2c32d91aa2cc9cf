"""Models larger than the device: their throughput, our choice beside Elixir's rule, and FSDP2's traffic.

The device is simulated (`benchmarks.simulated_device`): our own code moves the bytes, and the time is computed. The
device has room for the whole state of `layers` layers; models are 0.5 to 8 times as large. A layer is a chunk of 64 M
parameters with a fixed time for its forward pass and twice that time for its backward pass. The link has a fixed rate
each way, and the host updates a fixed number of elements a second.

Both rules choose the blocks of parameters in the cache and the chunks with their states on the device; the rest of the
step is the same. Ours takes the smallest cache that hides fetches, then states of the first chunks, then more cache.
Elixir's rule (`search/optimal.py`) compares what a byte of either saves in a step without overlap.

The traffic of FSDP2 with `CPUOffloadPolicy` is counted on one rank of a CPU: copies to and from its device, and the
most bytes of its gathered parameters and whole gradients. No real device is present, so FSDP2 has no time. FSDP2 sends
the gradients of each microbatch and accumulates them on the host. Ours is measured both ways for several microbatches,
and with twice the layers.
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
_WIDTH = 16  # of a layer in the simulation
_SCALE = 64e6 / _WIDTH**2  # elements for which an element of that layer stands
_STATE, _PARAMETER = 16, 2  # bytes of an element: of all state, and of parameters
_GRADIENTS = 3 * 2  # whole gradients in bf16: one in computation, two on their way to the host
_BLOCKS = 4  # least blocks of parameters: in use, arriving, and kept for the next use
_ON_DEVICE = 50e9  # elements/s of an update on the device, which Elixir's rule needs
_STEPS = 3
_TRAFFIC = 12, 64  # layers whose traffic is counted, and their width
_ON_HOST = "ours, gradients added up on the host"


class Machine(NamedTuple):
    """The device has `room` bytes for an element of a chunk; a layer's forward pass takes `forward` seconds.

    The link carries `link` bytes/s each way, and the host updates `updates` elements/s.
    """

    room: int
    forward: float
    link: float
    updates: float


class Choice(NamedTuple):
    """The blocks of the cache, and the chunks with their whole state on the device."""

    cache: int
    states: int


def ours(machine: Machine, layers: int) -> Choice:
    """Returns the smallest cache, then states of the first chunks, then more cache."""
    left = machine.room - _PARAMETER * _BLOCKS - _GRADIENTS
    states = max(0, min(layers, left // _STATE))
    return Choice(min(layers - states, _BLOCKS + (left - states * _STATE) // _PARAMETER), states)


def elixir(machine: Machine, layers: int) -> Choice:
    """Returns the choice of Elixir's rule on one rank: more cache first, if its memory saves more there than for
    states."""
    per_block = 2 * _PARAMETER / machine.link
    per_state = (4 / machine.link + per_block + _PARAMETER / machine.link + 1 / machine.updates - 1 / _ON_DEVICE) / 7
    if per_block <= per_state:
        return ours(machine, layers)
    left = machine.room - _GRADIENTS
    if left < _PARAMETER * layers:
        return Choice(left // _PARAMETER, 0)
    # Chunks with states on the device need no block
    states = min(layers, (left - _PARAMETER * layers) // (_STATE - _PARAMETER))
    return Choice(layers - states, states)


def fewest_loads(layers: int, choice: Choice, microbatches: int = 1) -> int:
    """Returns 2 M L - (2 M - 1) C for the L chunks that are fetched."""
    fetched = layers - choice.states
    return 2 * microbatches * fetched - (2 * microbatches - 1) * min(choice.cache, fetched)


def run(
    layers: Annotated[int, Option(help="Layers of 64 M parameters whose whole state fits on the device.")] = 24,
    forward_ms: Annotated[
        float, Option(help="Milliseconds of a layer's forward pass; the backward pass takes twice as long.")
    ] = 20,
    link: Annotated[float, Option(help="Rate of the link in GB/s, each way.")] = 25,
    updates: Annotated[float, Option(help="Rate of updates on the host, in billion elements/s.")] = 2.2,
) -> Result:
    """Returns rows of each size with our choice and with Elixir's rule, and the traffic of FSDP2 beside ours.

    - `offload.share_at_3x`: our throughput per layer at 3 times the device, over that with everything on the device.
    - `offload.vs_elixir_rule`: our throughput over that with Elixir's rule, the geometric mean over sizes beyond the device.
    - `offload.loads_vs_optimal`: the largest ratio of our fetches to the fewest possible.
    - `offload.fsdp2_bytes_vs_ours`: the bytes of a step of one microbatch.

    Raises `UserError` for a device that holds too few layers.
    """
    if layers < _BLOCKS:
        raise UserError(
            f"--layers {layers}: a device that holds fewer than {_BLOCKS} blocks hides no fetch: give more layers"
        )
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
    """Measures the third step of a rule's choice, or with everything on the device if that fits."""
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
    """Returns the row of bytes up and down for an element of the model, and of the device's peak for an element of a
    layer."""
    row: Row = {"contestant": name, "microbatches": microbatches, "layers": layers}
    return row | {"up": up, "down": down, "device": device}


def _fsdp2_traffic(microbatches: int) -> Row:
    """Counts FSDP2's traffic on one rank of a CPU, by its calls of `Tensor.to`, which copy nothing here."""
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

    for _ in range(2):  # the first pass allocates host gradients, which are no memory of the device
        moved.update(dict.fromkeys(moved, 0))
        with patch.object(torch.Tensor, "to", to), tracking() as memory:
            for _ in range(microbatches):
                net(torch.randn(1, width)).square().mean().backward()
    up, down = (each / layers / width**2 for each in moved.values())
    return _traffic_row("FSDP2, CPUOffloadPolicy", microbatches, layers, up, down, memory.peak / width**2)
