"""Updates on arrival (AxoNN, section 3.3.3) on real ranks whose links are held back, and what its guards cost.

Two data-parallel ranks reduce and update chunks of made-up gradients after the backward pass, as in AxoNN's figure 3.6.
Processes, all-reduces and updates are real. A link holds each piece back until the time at which a link of this latency
and bandwidth, which carries one piece at a time, would have carried it. The bandwidth makes all reductions together 2.5
times as long as all updates, as in AxoNN's figure 3.4. Orders take turns, and times are the shortest of the rounds, as
other programs only make them longer.

`model_ms` is r + u + (p - 1) max(r, u) for p pieces, with the link's r and the measured u of a piece.

Guards keep a step with NaN or Inf from changing the state. `bound` measures this rank's gradients before they are sent;
`undo` would copy each piece of weights and moments before its update; the norm before the update is the plain order.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor
from typer import Option

from benchmarks.harness import Result, Row, take_turns
from benchmarks.optimizer import together
from benchmarks.pipeline_waits import wait_until
from benchmarks.training import configuration
from optimus.comm import Group, Groups, Handle
from optimus.config import RunConfig
from optimus.kernels.square_sum import rough_square_sum
from optimus.model.architecture import ModelConfig
from optimus.plan.measure.ranks import run_fresh
from optimus.resolve.ranks import mesh_of
from optimus.state.model_state import ModelState
from optimus.testing.steps import build

_MODEL = ModelConfig(family="qwen3", hidden=256, layers=4, heads=4, intermediate=704, vocab=4096)
_TILE = 1 << 17
_TILES = (1, 2, 4, 8, None)  # in each all-reduce
_LATENCY, _RATIO = 2e-3, 2.5
_WARM_UP = 1
_LR = 1e-4


class _Link:
    """A link that carries one piece at a time."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth, self._free = bandwidth, 0.0

    def take(self, size: float) -> float:
        """Returns the time at which `size` bytes, begun now, have arrived."""
        self._free = max(time.perf_counter(), self._free) + _LATENCY + size / self.bandwidth
        return self._free


class _HeldBack(NamedTuple):
    """A group whose all-reduces also wait for a link."""

    group: Group
    link: _Link

    def all_reduce_async(self, tensor: Tensor) -> Handle:
        handle, end = self.group.all_reduce_async(tensor), self.link.take(tensor.nbytes)

        def wait() -> None:
            handle.wait()
            wait_until(end)

        return Handle(wait)


class Measured(NamedTuple):
    """Seconds of a step of one number of tiles."""

    plain: float
    on_arrival: float
    update: float  # alone
    pieces: int
    link: float  # of all pieces


def run(rounds: Annotated[int, Option(help="Rounds in which both orders take turns.")] = 10) -> Result:
    """Returns a row for each number of tiles in an all-reduce, then a row for each guard.

    The ratio `on_arrival.speedup` is that of the best number of tiles, over the plain order with one piece.
    """
    configs = [_config(tiles) for tiles in _TILES]
    measured, guards = run_fresh(_measure, 2, configs, rounds)[0]
    rows = [_row(*each) for each in zip(_TILES, measured)]
    best = min(each.on_arrival for each in measured)
    ratios = {"on_arrival.speedup": measured[-1].plain / best}
    return Result([*rows, *guards], ratios, tables={"pieces": rows, "guards": guards})


def _config(tiles: int | None) -> RunConfig:
    state = {"chunk": 1 << 24, "tile": _TILE, "all_reduce_tiles": tiles}
    return configuration(_MODEL.model_dump(), 2, 2, micro_batch=1, parallel={"data": 2}, state=state)


def _row(tiles: int | None, found: Measured) -> Row:
    p = found.pieces
    r, u = found.link / p, found.update / p
    return {
        "tiles": tiles or "all",
        "pieces": p,
        "reduce_ms": 1e3 * found.link,
        "update_ms": 1e3 * found.update,
        "plain_ms": 1e3 * found.plain,
        "on_arrival_ms": 1e3 * found.on_arrival,
        "model_ms": 1e3 * (r + u + (p - 1) * max(r, u)),
    }


def _measure(configs: list[RunConfig], rounds: int) -> tuple[list[Measured], list[Row]]:
    """Measures all numbers of tiles, and then the guards, on one rank."""
    groups = Groups(mesh_of(configs[0], 2))
    states = [build(config, groups)[1] for config in configs]
    for state in states:
        state.initialize(1, 0.02)
    (update,) = take_turns({0: partial(_updating, states[0])}, rounds, warm_up=_WARM_UP).values()
    elements = sum(chunk.plan.updated for chunk in states[0].trained)
    link = _Link(4 * elements / (_RATIO * min(update)))
    found = list[Measured]()
    for state in states:
        for chunk in state.trained:
            held_back = _HeldBack(chunk.gradients.replica_group, link)
            chunk.gradients.replica_group = cast(Group, held_back)
        orders = {order: partial(_step, state, groups, order) for order in (False, True)}
        times = take_turns(orders, rounds, warm_up=_WARM_UP)
        pieces = sum(-(-chunk.plan.updated // chunk.gradients.piece) for chunk in state.trained)
        carried = pieces * _LATENCY + 4 * elements / link.bandwidth
        found.append(Measured(min(times[False]), min(times[True]), min(update), pieces, carried))
    return found, _guards(states[0], rounds)


def _filled(state: ModelState, bounded: bool) -> float:
    state.begin_step(bounded=bounded)
    for chunk in state.trained:
        chunk.gradients.gradient.fill_(1e-6)
    return together()


def _updating(state: ModelState) -> float:
    """Returns the seconds of the updates alone."""
    _filled(state, False)
    state.reduce_gradients()
    began = together()
    state.step(_LR, 1.0)
    return together() - began


def _step(state: ModelState, groups: Groups, on_arrival: bool) -> float:
    """Returns the seconds from the end of the backward pass to the end of the step."""
    began = _filled(state, on_arrival)
    if on_arrival:
        groups.world.all_reduce(bound_1 := state.square_bound())
        if not bool(bound_1.isfinite()):
            raise RuntimeError("the bound of finite gradients is not finite")
        state.reduce_and_step(_LR, 1.0)
    else:
        state.reduce_gradients()
        state.step(_LR, 1.0)
    return together() - began


def _guards(state: ModelState, rounds: int) -> list[Row]:
    """Returns the time and the memory of each guard, per 10^6 parameters of AdamW."""
    chunk = max(state.trained, key=lambda each: each.plan.updated)
    parts = [chunk.gradients.reduced, *chunk.resident.values()]
    kept = [torch.empty_like(part) for part in parts[1:]]

    def seconds(work: Callable[[], Any]) -> Callable[[], float]:
        def timed() -> float:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        return timed

    def undo() -> None:
        for to, part in zip(kept, parts[1:]):
            to.copy_(part)

    times = take_turns({"bound": seconds(lambda: rough_square_sum(parts[0])), "undo": seconds(undo)}, rounds, warm_up=1)
    scale = 1e6 / len(parts[0])
    memory = {"bound": 0.0, "undo": float(sum(part.element_size() for part in parts[1:]))}
    return [
        {"guard": guard, "ms_per_million": 1e3 * scale * min(each), "mb_per_million": memory[guard]}
        for guard, each in times.items()
    ]
