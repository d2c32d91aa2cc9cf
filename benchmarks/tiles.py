"""Which tiles the experts' grouped products are fastest in on this chip: candidates for `kernels.triton.tuning.preferred`.

The rows of a tile are common to all products of routed rows, which share one table of tiles; so every kernel is timed for
each number of rows, and the sum says which number serves the layer best. Compiling takes longer than running: candidates are
tried in order, the likeliest first, for as long as the kernel's part of the time lasts.

Legend: T tokens, P = T * K routed rows, E experts, K experts per token, H hidden, I intermediate, J = 2 I.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.harness import Row, Stopwatch, preset
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
_PAIRED = [(128, 64), (128, 32), (64, 64)]  # of the product that has two tiles of sums
_WEIGHT_GRADIENTS = [(128, 256, 64), (128, 128, 64), (256, 128, 64), (128, 256, 32), (128, 128, 32)]

Run = Callable[[], object]


def run(
    *,
    model: str = "mula-7b-a1b",
    tokens: int = 16384,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "auto",
    seconds: float = 85.0,
) -> list[Row]:
    """For each kernel and number of rows of a tile: the fastest tiles found, and their rate next to the present choice's.

    Rows of equal `rows`: `up`, `down`, `down_backward`, `up_backward`, then their sum; last of all `weight_gradient`.

    Raises `UserError` for a model without experts, and where there is no accelerator.
    """
    config = preset(model)
    if config.experts is None:
        raise UserError(f"--model {model} has no experts, whose products --tune is about: choose another")
    chip = find_device(device, "--device")
    if chip.type == "cpu":
        raise UserError("--tune times Triton's tiles on an accelerator: this machine has none, or --device says cpu")
    return search(config, tokens, dtype, chip, seconds)


def search(model: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device, seconds: float) -> list[Row]:
    """What `run` returns, for a model with experts."""
    from optimus.kernels.triton.tuning import Tiles, preferred
    from optimus.testing.trial import trial

    share = seconds / (4 * len(_ROWS) + 1)
    rows: list[Row] = []
    for tile_rows in _ROWS:
        with trial("up", preferred("up", dtype, chip_of(device))._replace(rows=tile_rows)):  # which decides for all
            stages = dict(_stages(model, tokens, dtype, device, tile_rows))
        found = []
        for kernel, (stage, flops) in stages.items():
            shapes = _PAIRED if kernel == "up" else _PRODUCTS
            candidates = [Tiles(tile_rows, c, i, w, s) for c, i in shapes for w, s in _SCHEDULES]
            if kernel != "weight_gradient":
                found.append(_best(kernel, stage, flops, candidates, share, dtype, device))
        rows += [*found, {"kernel": "all four", "rows": tile_rows, "ms": sum(row["ms"] for row in found)}]
        if tile_rows == _ROWS[0]:
            of_weights = [Tiles(m, n, r, w, s) for m, n, r in _WEIGHT_GRADIENTS for w, s in _SCHEDULES]
            last = _best("weight_gradient", *stages["weight_gradient"], of_weights, share, dtype, device)
    return [*rows, last]


def _stages(
    model: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device, tile_rows: int
) -> Iterator[tuple["Kernel", tuple[Run, float]]]:
    """Each kernel's stage of the layer at random routing, and its floating point operations."""
    from optimus.kernels.triton import expert_down, expert_up
    from optimus.kernels.triton.grouped import grouped_product
    from optimus.kernels.triton.token_index import token_index

    assert model.experts is not None
    assert model.experts_per_token is not None
    T, E, K, H, I = tokens, model.experts, model.experts_per_token, model.hidden, model.intermediate
    P = T * K

    def random(*shape: int) -> Tensor:
        return 0.1 * torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    routes = token_index(torch.rand(T, E, device=device).topk(K).indices, E, tile_rows)
    x_TH, weights_TK, gate_up_EJH, down_EHI = random(T, H), random(T, K), random(E, 2 * I, H), random(E, H, I)
    z_PJ, h_PI = random(P, 2 * I), random(P, I)
    into_EJH, into_EHI = (torch.zeros_like(w, dtype=torch.float32) for w in (gate_up_EJH, down_EHI))
    token_P = routes.token_P()
    product = 2.0 * P * H * I

    def weight_gradients() -> None:
        expert_up.expert_up_weight_gradient(z_PJ, x_TH, token_P, routes, into_EJH, accumulate=True)
        expert_down.expert_down_weight_gradient(x_TH, h_PI, token_P, routes, into_EHI, accumulate=True)

    yield "up", (lambda: expert_up.expert_up(x_TH, gate_up_EJH, token_P, routes), 2 * product)
    yield "down", (lambda: expert_down.expert_down(h_PI, down_EHI, routes), product)
    yield (
        "down_backward",
        (lambda: expert_down.expert_down_backward(x_TH, weights_TK, z_PJ, down_EHI, token_P, routes), product),
    )
    yield (
        "up_backward",
        (lambda: grouped_product("up_backward", z_PJ, gate_up_EJH, routes, transposed=False), 2 * product),
    )
    yield "weight_gradient", (weight_gradients, 3 * product)


def _best(
    kernel: "Kernel", stage: Run, flops: float, candidates: "Sequence[Tiles]", seconds: float, dtype: torch.dtype,
    device: torch.device,
) -> Row:  # fmt: skip
    from optimus.kernels.triton.tuning import preferred
    from optimus.testing.trial import trial

    present = preferred(kernel, dtype, chip_of(device))
    if kernel != "weight_gradient":
        present = present._replace(rows=candidates[0].rows)
    end = time.perf_counter() + seconds
    times: dict[Tiles, float] = {}
    failed = 0
    for tiles in dict.fromkeys([present, *candidates]):
        if times and time.perf_counter() > end:
            break
        with trial(kernel, tiles):
            try:
                times[tiles] = _milliseconds(stage, device)
            except Exception as error:  # whatever the compiler or the chip refuses is no candidate
                if tiles == present:
                    raise
                print(
                    f"{kernel} in {tuple(tiles)}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
                failed += 1
    best = min(times, key=times.__getitem__)
    return {
        "kernel": kernel, "rows": best.rows, "columns": best.columns, "inner": best.inner, "warps": best.warps,
        "stages": best.stages, "ms": times[best], "tflops": flops / times[best] / 1e9,
        "present_tflops": flops / times[present] / 1e9, "tried": len(times), "failed": failed,
    }  # fmt: skip


def _milliseconds(stage: Run, device: torch.device) -> float:
    """The fastest of some rounds, after the pass that compiles."""
    stage()
    watch = Stopwatch(device, threads=torch.get_num_threads())
    return 1e3 * min(watch.time(stage, _REPEATS) for _ in range(_ROUNDS))
