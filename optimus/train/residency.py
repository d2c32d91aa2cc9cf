"""What of the state is on the device where most is not: as configured, or what there is room for (`auto`)."""

import time
from collections.abc import Callable, Sequence

import torch

from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.optim.adamw import AdamW
from optimus.optim.rule import OptimizerStep, Tile
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation
from optimus.state.buffers import RESIDENCES
from optimus.state.plan import ChunkPlan, bytes_by_kind
from optimus.state.transfers import Transfers, transfers
from optimus.train.recomputation import activation_shapes

_SHARE = 0.9  # of the free memory
_BLOCKS = 3  # of parameters at least, besides those that come ahead of use: in use, arriving, and kept for its next use
_GRADIENTS = 3  # whole gradient buffers: one that is filled, two on their way to the host
_MEASURED = 1 << 22  # elements of an update that is timed

Plans = Callable[[RunConfig], Sequence[ChunkPlan]]


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
    fetches, note = RESIDENCES[state.residency][0] != "device", None
    chosen: dict[str, object] = {"cache": "auto" if state.cache is None and fetches else state.cache}
    if state.residency == "disk":
        chosen["disk"] = state.disk or config.train.output
    if state.update_on == "auto" and state.residency != "device":
        chosen["update_on"] = groups.world.on_first(lambda: faster_place(transfers(device)))
    config = _with_state(config, **chosen)
    if "auto" in (config.state.cache, config.state.device_states):
        share, cache = map(min, zip(*groups.world.all_gather_object(_room(config, groups, free, plans))))
        config = _with_state(
            config,
            device_states=share if config.state.device_states == "auto" else config.state.device_states,
            cache=cache if config.state.cache == "auto" else config.state.cache,
        )
        held = f"{config.state.cache} chunks of parameters at a time and " if config.state.cache else ""
        note = f"state.residency {state.residency}: the device has {held}{share:.0%} of the optimizer state"
    return config, note


def _with_state(config: RunConfig, **values: object) -> RunConfig:
    return config.model_copy(update={"state": config.state.model_copy(update=values)})


def _room(config: RunConfig, groups: Groups, free: int, plans: Plans) -> tuple[float, int]:
    """(fraction of the chunks whose state the device has room for, blocks of parameters).

    First comes the least cache, then states of the first chunks, then more cache.
    """
    itemsize = torch.finfo(getattr(torch, config.train.precision)).bits // 8
    given = (
        Recomputation()
        if "auto" in config.recompute
        else Recomputation(tuple(config.recompute), config.recompute_every)
    )
    activations = activation_bytes(config.model, given, **activation_shapes(config, groups.mesh, itemsize))
    elsewhere, here = (plans(_with_state(config, device_states=fraction)) for fraction in (0.0, 1.0))
    cached = [plan for plan in elsewhere if plan.lifetime == "cache"]
    block = max((plan.size * itemsize for plan in cached), default=0)
    gradient = getattr(torch, config.state.gradient_dtype).itemsize
    waiting = sum(plan.updated * gradient for plan in cached) + _GRADIENTS * gradient * max(
        (plan.size for plan in cached), default=0
    )
    left = int(free * _SHARE) - activations.peak * config.parallel.pipeline - waiting
    left -= sum(bytes_by_kind(elsewhere).values())
    least = min(len(cached), _BLOCKS + config.state.prefetch)
    blocks = least if config.state.cache in ("auto", None) else int(config.state.cache)
    left -= blocks * block
    fraction = 0.0 if config.state.device_states == "auto" else config.state.device_states
    if config.state.device_states == "auto":
        total, size = sum(plan.size for plan in here), 0
        for plan, other in zip(here, elsewhere):
            left -= sum(plan.bytes_by_kind().values()) - sum(other.bytes_by_kind().values())
            if left < 0:
                break
            size += plan.size
        fraction = size / total
    return fraction, max(1, min(len(cached), blocks + max(0, left) // block)) if block else 1


def faster_place(moves: Transfers) -> str:
    """Where AdamW updates state of the host in less time: on the host, or through the device."""
    return min(("host", "device"), key=lambda on: _seconds(moves, on))


def _seconds(moves: Transfers, on: str) -> float:
    if on == "device" and moves.device.type == "cpu":  # the same processor, and copies besides
        return float("inf")
    rule = AdamW(weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    state = [moves.on_host(_MEASURED, torch.float32) for _ in range(4)]

    def update() -> None:
        with moves.tile(0):
            weight, gradient, *moments = (
                [moves.staged(i, part, on, filled=True) for i, part in enumerate(state)] if on == "device" else state
            )
            rule.update(OptimizerStep(1, 1e-4), Tile(weight, gradient, moments))
            if on == "device":
                for part, staged in zip(state, (weight, gradient, *moments)):
                    moves.put_back(part, staged)

    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        moves.submit(update, _MEASURED, on)()
        moves.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
