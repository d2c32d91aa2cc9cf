"""The precision of a run that leaves it to the machine (`train.precision: auto`)."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from optimus.comm import Group
from optimus.config import ModelConfig, RunConfig
from optimus.train.start import chosen_before

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORTH = 0.8  # of the time in fp32 is what bf16 may take: the rest of a step gains nothing by it
_ROWS, _FLOPS, _SECONDS = 256, 2e8, 0.5  # of the products that are timed


def with_precision(
    config: RunConfig, device: torch.device, resume: bool = False, world: Group | None = None
) -> tuple[RunConfig, str]:
    """`config` with a precision that says a type, and why it is that one, for the user.

    A run that is resumed keeps its own. On accelerators it is bfloat16 where they compute in it; on CPUs what is faster is
    measured. All ranks of `world` must call: its first one decides for all, as measurements differ.
    """
    if config.train.precision != "auto":
        return config, ""
    choose = partial(_chosen, config, device, resume)
    precision, why = choose() if world is None else world.on_first(choose)
    return config.changed(train={"precision": precision}), why


def _chosen(config: RunConfig, device: torch.device, resume: bool) -> tuple[str, str]:
    before = chosen_before(Path(config.train.output)).get("precision") if resume else None
    if before in ("float32", "bfloat16"):
        return before, " (as the run has chosen before)"
    if device.type != "cpu":
        if _accelerator_has_bfloat16(device):
            return "bfloat16", f" (auto: {device.type} computes in it)"
        return "float32", " (auto: no bfloat16 there)"
    ratio = bfloat16_to_float32(config.model)
    chosen = "bfloat16" if ratio <= WORTH else "float32"
    return chosen, f" (auto: here bfloat16 takes {ratio:.2f} times as long as float32)"


def _accelerator_has_bfloat16(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    try:
        return bool(module.is_bf16_supported(including_emulation=False))
    except (AttributeError, TypeError):  # other makers' have no emulation, or no such function
        return bool(getattr(module, "is_bf16_supported", lambda: False)())


def bfloat16_to_float32(model: ModelConfig, clock: Callable[[], float] = time.perf_counter) -> float:
    """How long matrix products of the model's sizes take in bf16 on the CPU, to the time in fp32, forward and backward.

    Of a few rows, in turn for half a second; where bf16 is very slow, once. Each counts by its best time, as what else runs
    on the machine disturbs some of them.
    """
    sizes = [(model.hidden, 3 * model.hidden), (model.hidden, model.intermediate)]
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    products = {dtype: [_products(inner, columns, dtype) for inner, columns in sizes] for dtype in best}
    for dtype in best:  # prepares kernels
        products[dtype][0]()
    began, rounds = clock(), 0
    while not rounds or clock() - began < _SECONDS:
        rounds += 1
        for dtype in best:
            start = clock()
            for product in products[dtype]:
                product()
            best[dtype] = min(best[dtype], clock() - start)
    return best[torch.bfloat16] / best[torch.float32]


def _products(inner: int, columns: int, dtype: torch.dtype) -> Callable[[], None]:
    """A product and the two of its backward pass."""
    rows = int(min(_ROWS, max(16.0, _FLOPS / (2 * inner * columns))))
    x = torch.randn(rows, inner).to(dtype)
    weight = torch.randn(columns, inner).to(dtype)
    gradient = torch.randn(rows, columns).to(dtype)

    def run() -> None:
        x @ weight.T
        gradient @ weight
        gradient.T @ x

    return run
