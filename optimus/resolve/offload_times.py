"""Seconds of a step whose state is not all on the device, and what of it should be there: equations, nothing is run.

A stage's chunks are taken as equal: L of S elements, shared out over n ranks, of M microbatches, f and b seconds of a
chunk's forward and backward pass, F = L f, B = L b. C of them are whole on the device at a time; the state of the first D
stays there. Updates come in the order of the next forward pass, each a seconds, A = (L - D) a in all:

    the update to the end           F + B + A
    in the order of use             B + max(F, A)                      hidden from D / L = 1 - F / A on
    uploads of a pass               L - C chunks, 2 M L - (2 M - 1) C in a step; beside the computation, as far as that goes
    gradients to the host           L - D chunks after the last backward pass; after each, where they are added up there
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from optimus.state.buffers import RESIDENCES

UpdatePlace = Literal["device", "host"]
_TILES = 4  # of a chunk that goes through the device, about: while one comes, the one before goes
_BUFFERS = 3  # of a disk: while one is read, one is updated and one written
_MASTER_AND_MOMENTS = 12  # bytes of an element: AdamW's


class Rates(NamedTuple):
    """Of a rank, while all of its node are at work. Bytes/s of its link up to the device and down, of gathering on the
    devices, of reading and writing a disk; elements/s of an update by the host, and in the device's memory."""

    up: float
    down: float
    host_update: float
    device_update: float
    gather: float = math.inf
    read: float = math.inf
    write: float = math.inf


class StepShape(NamedTuple):
    """What a rank computes in a step, as in the module's text."""

    chunks: int
    elements: int  # of a chunk
    forward: float  # seconds of a chunk
    backward: float
    microbatches: int = 1
    shards: int = 1
    offload: str = "all"
    itemsize: int = 2  # bytes of a parameter
    gradient: int = 2
    prefetch: int = 1
    whole: bool = True  # chunks whose state is on the device are whole there, and need no block
    sends: bool = False  # each microbatch's gradients to the host, where they are added up


class OffloadChoice(NamedTuple):
    """Blocks of parameters, chunks whose state is on the device, and where the others are updated."""

    cache: int
    device: int
    update_on: UpdatePlace


class UpdateBytes(NamedTuple):
    """Bytes of an element over each way of the link."""

    up: int
    down: int


def update_bytes(shape: StepShape, on: UpdatePlace) -> UpdateBytes:
    """Of an update: of state that goes through the device, or of gradients and parameters that live there."""
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
    """Chunks that are fetched in a step: each pass goes the way of the one before, backwards, and what is updated is fetched
    anew."""
    cache = min(cache, chunks)
    return 2 * microbatches * chunks - (2 * microbatches - 1) * cache


def update_seconds(shape: StepShape, rates: Rates, on: UpdatePlace) -> float:
    """Of one chunk, among others: the slowest of what is done at the same time, but for writing, which nobody waits for."""
    part, link = shape.elements / shape.shards, update_bytes(shape, on)
    work = rates.host_update if on == "host" else rates.device_update
    disk = _MASTER_AND_MOMENTS if RESIDENCES[shape.offload][2] == "disk" else 0
    return part * max(link.up / rates.up, link.down / rates.down, 1 / work, disk / rates.read)


def pass_seconds(shape: StepShape, rates: Rates, choice: OffloadChoice, computing: float) -> float:
    """Of a pass over all chunks, each of so many seconds, that fetches what the one before has dropped.

    As many chunks as are prefetched are on their way at a time; beside those that the cache still has no others come.
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
    """Of a backward pass but the last: with the gradients that it sends, beside which the computation goes on."""
    computing = pass_seconds(shape, rates, choice, shape.backward)
    sent = (shape.chunks - choice.device) * shape.elements / shape.shards * shape.gradient / rates.down
    return max(computing, sent) if shape.sends else computing


def first_pass_seconds(shape: StepShape, rates: Rates, choice: OffloadChoice) -> float:
    """Of the forward pass beside which the step before is updated, from the last gradient on."""
    f, away, on = shape.forward, shape.chunks - choice.device, choice.update_on
    computing = shape.chunks * f
    if not away:
        return computing
    fetch, gather, _, ahead = _fetching(shape, rates, choice)
    part, link = shape.elements / shape.shards, update_bytes(shape, on)
    update = update_seconds(shape, rates, on)
    arriving = 0.0
    if RESIDENCES[shape.offload][1] == "host":  # the gradients that leave last
        leaving = part * shape.gradient / rates.down
        arriving = max(0.0 if choice.device else leaving, away * leaving - shape.chunks * shape.backward)
    each = max(update, part * link.up / rates.up + fetch, (fetch + gather) / ahead if ahead else fetch + gather + f)
    disk = part * _MASTER_AND_MOMENTS / rates.read if RESIDENCES[shape.offload][2] == "disk" else 0.0
    work = rates.host_update if on == "host" else rates.device_update
    stages = part * link.up / rates.up, part * link.down / rates.down, part / work
    alone = sum(stages) if on == "host" else max(stages) + sum(stages) / _TILES
    writing = part * _MASTER_AND_MOMENTS / rates.write * (away - _BUFFERS) if disk else 0.0
    first = arriving + disk + alone + fetch + gather
    return max(computing, first + away * f, first + (away - 1) * each + f, first + writing + f)


def step_seconds(shape: StepShape, rates: Rates, choice: OffloadChoice) -> float:
    """Of a step, updates in the order of use."""
    backward = pass_seconds(shape, rates, choice, shape.backward)
    other = pass_seconds(shape, rates, choice, shape.forward) + backward_seconds(shape, rates, choice)
    there = choice.device * shape.elements / shape.shards / rates.device_update
    return first_pass_seconds(shape, rates, choice) + backward + (shape.microbatches - 1) * other + there


def _fetching(shape: StepShape, rates: Rates, choice: OffloadChoice) -> tuple[float, float, int, int]:
    """Seconds of a chunk over the link and of gathering it, chunks that a pass lacks, and how many come ahead of use."""
    if RESIDENCES[shape.offload][0] == "device":
        return 0.0, 0.0, 0, shape.prefetch
    away = shape.chunks - choice.device
    used = away if shape.whole else shape.chunks
    size, n = shape.itemsize * shape.elements, shape.shards
    fetch = size / n / rates.up * away / max(1, used)
    return fetch, size * (n - 1) / n / rates.gather, max(0, used - choice.cache), min(shape.prefetch, choice.cache - 1)


def choose(
    shape: StepShape,
    rates: Rates,
    free: float,
    block: float,
    kept: Sequence[float],
    *,
    caches: Iterable[int],
    devices: Iterable[int],
    places: Sequence[UpdatePlace] = ("device", "host"),
    spread: float = 0.0,
) -> OffloadChoice | None:
    """The fastest of all these choices that `free` bytes of the device have room for; None if none fits.

    `block` is what a block of parameters takes, `kept[D]` the state of the first D chunks. Of choices that are as fast, as
    far as can be told from rates that scatter by `spread`, the one with most state on the device, then with most blocks,
    then the first of `places`.
    """
    counts = [*devices]
    fitting = (OffloadChoice(c, d, on) for c in caches for d in counts if c * block + kept[d] <= free for on in places)
    seconds = {each: float(f"{step_seconds(shape, rates, each):.4g}") for each in fitting}
    least = min(seconds.values(), default=0.0)
    as_fast = [each for each, took in seconds.items() if took <= least * (1 + spread)]
    return max(as_fast, key=lambda each: (each.device, each.cache, -places.index(each.update_on)), default=None)
