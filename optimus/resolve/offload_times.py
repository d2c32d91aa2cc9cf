"""Predicts the time of a step with offloaded state by closed-form equations.

The equations assume equal chunks: a rank has L chunks of S elements, sharded over n ranks, and a step has M
microbatches. The forward and backward pass of a chunk take f and b seconds; F = L f, B = L b. The device has blocks for
C unsharded chunks. The state of the first D chunks stays on the device. The updates of the other chunks follow the
order of the next forward pass. Each update takes `a` seconds, and all updates take A = (L - D) a seconds.

The seconds of a step are, for M = 1, without uploads and without the time until the first update ends:

    update after the backward pass  F + B + A
    update in the order of use      B + max(F, A); the updates are hidden if A <= F

The numbers of chunks that the link transfers in a step are, if the host holds parameters and gradients:

    uploads, if D = 0 and C <= L    2 M L - (2 M - 1) C: L in the first pass, L - C in every other pass
    gradients to the host           L - D; M (L - D) if the host accumulates the gradients of each microbatch
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from optimus.state.buffers import RESIDENCES

UpdatePlace = Literal["device", "host"]
_TILES = 4  # approximate number of tiles of a chunk
_BUFFERS = 3  # host buffers for transfers from and to the disk
_MASTER_AND_MOMENTS = 12  # bytes per element of AdamW


class Rates(NamedTuple):
    """Rates of a rank while all ranks of its node are active.

    `up` and `down` are bytes/s of the link to the device and back, `gather` of all-gathers on the devices, `read` and
    `write` of a disk. `host_update` and `device_update` are elements/s of updates on the host and on the device.
    """

    up: float
    down: float
    host_update: float
    device_update: float
    gather: float = math.inf
    read: float = math.inf
    write: float = math.inf


class StepShape(NamedTuple):
    """The chunks, passes and sizes that determine the time of a rank's step."""

    chunks: int
    elements: int  # per chunk
    forward: float  # seconds per chunk
    backward: float
    microbatches: int = 1
    shards: int = 1
    offload: str = "all"
    itemsize: int = 2  # bytes per parameter
    gradient: int = 2
    prefetch: int = 1
    unsharded: bool = True  # True if chunks with resident state are unsharded on the device and need no block
    sends: bool = False  # True if the host accumulates the gradients of each microbatch


class OffloadChoice(NamedTuple):
    """The numbers of parameter blocks and of resident chunks, and the device or host for the other chunks' updates."""

    cache: int
    device: int
    update_on: UpdatePlace


class UpdateBytes(NamedTuple):
    """Bytes per element that an update transfers over the link in each direction."""

    up: int
    down: int


def update_bytes(shape: StepShape, on: UpdatePlace) -> UpdateBytes:
    """Returns the link traffic of an update."""
    home, waiting, _ = RESIDENCES[shape.offload]
    if on == "device":
        return UpdateBytes(
            _MASTER_AND_MOMENTS + (shape.gradient if waiting == "host" else 0),
            _MASTER_AND_MOMENTS + (shape.itemsize if home == "host" else 0),
        )
    return UpdateBytes(
        shape.itemsize if home == "device" else 0,
        shape.gradient if waiting == "device" else 0,
    )


def loads(chunks: int, cache: int, microbatches: int) -> int:
    """Returns the number of chunks fetched in a step if no chunk has resident state.

    Each pass visits the chunks in the reverse order of the previous pass. The last `cache` chunks of the previous pass
    are still on the device. After an update, the device has to fetch all chunks again.
    """
    cache = min(cache, chunks)
    return 2 * microbatches * chunks - (2 * microbatches - 1) * cache


def update_seconds(shape: StepShape, rates: Rates, on: UpdatePlace) -> float:
    """Returns the seconds per chunk of pipelined updates, without disk writes.

    Transfers, disk reads and computation overlap: the slowest determines the time.
    """
    part, link = shape.elements / shape.shards, update_bytes(shape, on)
    work = rates.host_update if on == "host" else rates.device_update
    disk = _MASTER_AND_MOMENTS if RESIDENCES[shape.offload][2] == "disk" else 0
    return part * max(link.up / rates.up, link.down / rates.down, 1 / work, disk / rates.read)


def pass_seconds(shape: StepShape, rates: Rates, choice: OffloadChoice, computing: float) -> float:
    """Returns the seconds of a pass over all chunks.

    `computing` is the computation time of a chunk in seconds.
    """
    fetch, gather, missing, ahead = _fetching(shape, rates, choice)
    there = (shape.chunks - missing) * computing
    if not missing:
        return there
    if not ahead:
        return there + missing * (fetch + gather + computing)
    each = max(fetch, gather, (fetch + gather) / ahead)
    early = min(there, min(ahead, missing) * each)
    return max(shape.chunks * computing, there + missing * each - early + computing)


def backward_seconds(shape: StepShape, rates: Rates, choice: OffloadChoice) -> float:
    """Returns the seconds of a backward pass that is not the last of a step."""
    computing = pass_seconds(shape, rates, choice, shape.backward)
    sent = (shape.chunks - choice.device) * shape.elements / shape.shards * shape.gradient / rates.down
    return max(computing, sent) if shape.sends else computing


def first_pass_seconds(shape: StepShape, rates: Rates, choice: OffloadChoice) -> float:
    """Returns the seconds from the end of a step's last backward pass to the end of the next forward pass.

    The updates of chunks without resident state run during this time.
    """
    f, away, on = shape.forward, shape.chunks - choice.device, choice.update_on
    computing = shape.chunks * f
    if not away:
        return computing
    fetch, gather, _, ahead = _fetching(shape, rates, choice)
    part, link = shape.elements / shape.shards, update_bytes(shape, on)
    update = update_seconds(shape, rates, on)
    arriving = 0.0
    if RESIDENCES[shape.offload][1] == "host":  # the last gradients are still on their way to the host
        offload = part * shape.gradient / rates.down
        arriving = max(0.0 if choice.device else offload, away * offload - shape.chunks * shape.backward)
    each = max(update, part * link.up / rates.up + fetch, (fetch + gather) / ahead if ahead else fetch + gather + f)
    disk = part * _MASTER_AND_MOMENTS / rates.read if RESIDENCES[shape.offload][2] == "disk" else 0.0
    work = rates.host_update if on == "host" else rates.device_update
    stages = part * link.up / rates.up, part * link.down / rates.down, part / work
    alone = sum(stages) if on == "host" else max(stages) + sum(stages) / _TILES
    writing = part * _MASTER_AND_MOMENTS / rates.write * (away - _BUFFERS) if disk else 0.0
    first = arriving + disk + alone + fetch + gather
    return max(computing, first + away * f, first + (away - 1) * each + f, first + writing + f)


def step_seconds(shape: StepShape, rates: Rates, choice: OffloadChoice) -> float:
    """Returns the seconds of a step with updates in the order of use."""
    backward = pass_seconds(shape, rates, choice, shape.backward)
    other = pass_seconds(shape, rates, choice, shape.forward) + backward_seconds(shape, rates, choice)
    there = choice.device * shape.elements / shape.shards / rates.device_update
    return first_pass_seconds(shape, rates, choice) + backward + (shape.microbatches - 1) * other + there


def _fetching(shape: StepShape, rates: Rates, choice: OffloadChoice) -> tuple[float, float, int, int]:
    """Returns (mean seconds to fetch a chunk, seconds to all-gather a chunk, number of chunks that a pass fetches,
    number of chunks to prefetch).
    """
    if RESIDENCES[shape.offload][0] == "device":
        return 0.0, 0.0, 0, shape.prefetch
    away = shape.chunks - choice.device
    used = away if shape.unsharded else shape.chunks
    size, n = shape.itemsize * shape.elements, shape.shards
    fetch = size / n / rates.up * away / max(1, used)
    return fetch, size * (n - 1) / n / rates.gather, max(0, used - choice.cache), min(shape.prefetch, choice.cache - 1)


def choose(
    shape: StepShape,
    rates: Rates,
    free: float,
    block: float,
    resident: Sequence[float],
    *,
    caches: Iterable[int],
    devices: Iterable[int],
    update_on: Sequence[UpdatePlace] = ("device", "host"),
    spread: float = 0.0,
) -> OffloadChoice | None:
    """Returns the fastest choice for which `free` bytes of the device suffice; None if no choice fits.

    `block` is the size of a parameter block in bytes. The device needs `resident[D]` additional bytes if the state of
    the first D chunks is resident. Choices within `spread` of the fastest count as equally fast; the most resident
    state then wins.
    """
    counts = [*devices]
    fitting = (
        OffloadChoice(c, d, on) for c in caches for d in counts if c * block + resident[d] <= free for on in update_on
    )
    seconds = {each: float(f"{step_seconds(shape, rates, each):.4g}") for each in fitting}
    least = min(seconds.values(), default=0.0)
    as_fast = [each for each, took in seconds.items() if took <= least * (1 + spread)]
    return max(as_fast, key=lambda each: (each.device, each.cache, -update_on.index(each.update_on)), default=None)
