"""The fastest tiles of the experts' grouped products on this chip: candidates for `kernels.triton.tuning.preferred`.

All products of routed rows share one table of tiles, and so the rows of a tile. Every kernel is therefore timed for
each number of rows, and the sum shows the best number for the layer. Compiling takes far longer than running, so all
cores first compile, each kernel's likeliest candidates before others, for at most two thirds of the time.

Legend: T tokens, P = T * K routed rows, E experts, K experts per token, H hidden, I intermediate, J = 2 I.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Row, Stopwatch, preset
from optimus.cores import usable_cores
from optimus.errors import UserError
from optimus.kernels.devices import chip_of
from optimus.model.architecture import ModelConfig
from optimus.observe.machine import find_device

if TYPE_CHECKING:
    from optimus.kernels.triton.tuning import Kernel, Tiles

_REPEATS, _ROUNDS = 5, 4
_ROWS = (128, 64)
_SCHEDULES = [(8, 3), (8, 4), (4, 4), (4, 3)]  # warps, stages
_PRODUCTS = [(256, 64), (128, 64), (128, 32), (256, 32), (64, 64)]  # columns, inner
_PAIRED = [(128, 64), (128, 32), (64, 64)]  # of the product with two tiles of sums
_SHAPES: dict["Kernel", list[tuple[int, int]]] = {
    "up": _PAIRED, "down": _PRODUCTS, "down_backward": _PRODUCTS, "up_backward": _PRODUCTS
}  # fmt: skip
_WEIGHT_GRADIENTS = [(128, 256, 64), (128, 128, 64), (256, 128, 64), (128, 256, 32), (128, 128, 32)]
_COMPILING = 2 / 3  # share of the time
_MOST_COMPILERS = 16  # each has a context and a small layer on the device

Run = Callable[[], object]


class Candidate(NamedTuple):
    kernel: "Kernel"
    tile_rows: int  # of the routed rows
    tiles: "Tiles"


class Layer(NamedTuple):
    """The layer whose products are timed."""

    model: ModelConfig
    tokens: int
    dtype: torch.dtype
    device: torch.device


def run(
    *,
    model: str = "mula-7b-a1b",
    tokens: int = 16384,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "auto",
    seconds: float = 85.0,
) -> list[Row]:
    """Returns the fastest tiles of each kernel and number of rows, with their rate and that of the present choice.

    Rows of equal `rows` are `up`, `down`, `down_backward` and `up_backward`, then their sum; `weight_gradient` is last.
    Raises `UserError` for a model without experts, and without an accelerator.
    """
    config = preset(model)
    if config.experts is None:
        raise UserError(f"--model {model} has no experts, whose products --tune times: choose another")
    chip = find_device(device, "--device")
    if chip.type == "cpu":
        raise UserError("--tune times Triton's tiles on an accelerator: this machine has none, or --device says cpu")
    return search(Layer(config, tokens, dtype, chip), seconds, compilers())


def compilers() -> int:
    """Returns the number of processes that compile at a time."""
    return min(usable_cores(), _MOST_COMPILERS)


def search(layer: Layer, seconds: float, compilers: int) -> list[Row]:
    """Returns the rows of `run`. Without `compilers`, a candidate is compiled during its timing."""
    end = time.perf_counter() + seconds
    of_kernel = _candidates(layer)
    if compilers:
        of_kernel = _compiled(of_kernel, layer, seconds * _COMPILING, compilers)
    rows: list[Row] = []
    for tile_rows in _ROWS:
        found = {
            kernel: _best(of_kernel[kernel, tile_rows], stage, flops, layer.device, end)
            for kernel, (stage, flops) in _stages(layer, tile_rows).items()
            if (kernel, tile_rows) in of_kernel
        }
        if tile_rows == _ROWS[0]:
            of_weights = found.pop("weight_gradient")
        rows += [*found.values(), {"kernel": "all four", "rows": tile_rows, "ms": sum(r["ms"] for r in found.values())}]
    return [*rows, of_weights]


def _candidates(layer: Layer) -> dict[tuple["Kernel", int], list[Candidate]]:
    """Returns the candidates by kernel and rows of a tile: the present choice, then others, the likeliest first."""
    from optimus.kernels.triton.tuning import Tiles, preferred

    chip = chip_of(layer.device)

    def all_of(kernel: "Kernel", rows: int, shapes: list[tuple[int, int, int]]) -> list[Candidate]:
        present = preferred(kernel, layer.dtype, chip)
        if kernel != "weight_gradient":
            present = present._replace(rows=rows)
        others = (Tiles(*shape, *schedule) for shape in shapes for schedule in _SCHEDULES)
        return [Candidate(kernel, rows, tiles) for tiles in dict.fromkeys([present, *others])]

    products = {(k, r): all_of(k, r, [(r, *s) for s in shapes]) for k, shapes in _SHAPES.items() for r in _ROWS}
    return products | {("weight_gradient", _ROWS[0]): all_of("weight_gradient", _ROWS[0], _WEIGHT_GRADIENTS)}


def _compiled(
    of_kernel: dict[tuple["Kernel", int], list[Candidate]], layer: Layer, seconds: float, compilers: int
) -> dict[tuple["Kernel", int], list[Candidate]]:
    """Compiles candidates in processes until the time is over, and prints errors.

    Returns the compiled candidates, which are then in Triton's cache, and all present choices.
    """
    in_turn = [c for turn in zip_longest(*of_kernel.values()) for c in turn if c is not None]
    with ProcessPoolExecutor(compilers, multiprocessing.get_context("spawn")) as pool:
        tasks = {candidate: pool.submit(_refused, candidate, layer) for candidate in in_turn}
        wait(tasks.values(), seconds)
        pool.shutdown(cancel_futures=True)
    done = {candidate: task.result() for candidate, task in tasks.items() if not task.cancelled()}
    for candidate, why in done.items():
        if why:
            print(f"{candidate.kernel} in {tuple(candidate.tiles)}: {why}")
    return {key: [first, *(c for c in rest if done.get(c) == "")] for key, (first, *rest) in of_kernel.items()}


def _refused(candidate: Candidate, layer: Layer) -> str:
    """Runs a candidate once in a process of its own, on few tokens and experts of full width; returns the error, if
    any."""
    assert layer.model.experts_per_token is not None
    few = layer.model.model_copy(update={"experts": layer.model.experts_per_token})
    stage, _ = _few_stages(layer._replace(model=few, tokens=2 * candidate.tile_rows), candidate.tile_rows)[
        candidate.kernel
    ]
    return _attempt(candidate, stage)


_few_stages = cache(lambda layer, tile_rows: _stages(layer, tile_rows))


def _attempt(candidate: Candidate, stage: Run) -> str:
    """Runs a candidate once; returns the error, if any."""
    from optimus.testing.trial import trial

    with trial(candidate.kernel, candidate.tiles):
        try:
            stage()
        except Exception as error:  # a candidate that the compiler or the chip refuses is left out
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _stages(layer: Layer, tile_rows: int) -> dict["Kernel", tuple[Run, float]]:
    """Returns each kernel's stage of the layer with random routing, in tiles of so many rows, and its FLOPs."""
    from optimus.kernels.triton import expert_down, expert_up
    from optimus.kernels.triton.grouped import grouped_product
    from optimus.kernels.triton.token_index import token_index

    model = layer.model
    assert model.experts is not None
    assert model.experts_per_token is not None
    T, E, K, H, I = layer.tokens, model.experts, model.experts_per_token, model.hidden, model.intermediate
    P = T * K

    def random(*shape: int) -> Tensor:
        return 0.1 * torch.randn(*shape, device=layer.device, dtype=torch.float32).to(layer.dtype)

    routes = token_index(torch.rand(T, E, device=layer.device).topk(K).indices, E, tile_rows)
    x_TH, weights_TK, gate_up_EJH, down_EHI = random(T, H), random(T, K), random(E, 2 * I, H), random(E, H, I)
    z_PJ, h_PI = random(P, 2 * I), random(P, I)
    into_EJH, into_EHI = (torch.zeros_like(w, dtype=torch.float32) for w in (gate_up_EJH, down_EHI))
    token_P = routes.token_P()
    product = 2.0 * P * H * I

    def weight_gradients() -> None:
        expert_up.expert_up_weight_gradient(z_PJ, x_TH, token_P, routes, into_EJH, accumulate=True)
        expert_down.expert_down_weight_gradient(x_TH, h_PI, token_P, routes, into_EHI, accumulate=True)

    return {
        "up": (lambda: expert_up.expert_up(x_TH, gate_up_EJH, token_P, routes), 2 * product),
        "down": (lambda: expert_down.expert_down(h_PI, down_EHI, routes), product),
        "down_backward": (
            lambda: expert_down.expert_down_backward(x_TH, weights_TK, z_PJ, down_EHI, token_P, routes), product
        ),
        "up_backward": (
            lambda: grouped_product("up_backward", z_PJ, gate_up_EJH, routes, transposed=False), 2 * product
        ),
        "weight_gradient": (weight_gradients, 3 * product),
    }  # fmt: skip


def _best(candidates: list[Candidate], stage: Run, flops: float, device: torch.device, end: float) -> Row:
    """Returns the best candidate of those timed before `end`; the first, the present choice, is always timed."""
    from optimus.testing.trial import trial

    watch = Stopwatch(device, threads=torch.get_num_threads())
    milliseconds: dict[Tiles, float] = {}
    failed = 0
    for candidate in candidates:
        if milliseconds and time.perf_counter() > end:
            break
        if why := _attempt(candidate, stage):
            if candidate == candidates[0]:
                raise RuntimeError(f"{candidate.kernel} in {tuple(candidate.tiles)}, its present tiles: {why}")
            print(f"{candidate.kernel} in {tuple(candidate.tiles)}: {why}")
            failed += 1
            continue
        with trial(candidate.kernel, candidate.tiles):
            milliseconds[candidate.tiles] = 1e3 * min(watch.time(stage, _REPEATS) for _ in range(_ROUNDS))
    best, present = min(milliseconds, key=milliseconds.__getitem__), candidates[0].tiles
    return {
        "kernel": candidates[0].kernel, "rows": best.rows, "columns": best.columns, "inner": best.inner,
        "warps": best.warps, "stages": best.stages, "ms": milliseconds[best],
        "tflops": flops / milliseconds[best] / 1e9, "present_tflops": flops / milliseconds[present] / 1e9,
        "tried": len(milliseconds), "failed": failed,
    }  # fmt: skip
