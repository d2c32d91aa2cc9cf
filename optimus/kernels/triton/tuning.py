"""The tiles that each kernel works in: one table, chosen by type and size; no measuring while training.

Sizes depend on the layer's shape and on the power of two of the mean rows per expert, never on the exact number of tokens: a
batch of another length compiles nothing new. Whoever has a chip at hand times candidates (`testing/trial.py`) and writes the
winner into `preferred`.

Legend: T tokens, K experts per token, E experts.
"""

from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kernel = Literal["up", "down", "down_backward", "up_backward", "weight_gradient"]


class Tiles(NamedTuple):
    """Shape of one program's product [rows, inner] @ [inner, columns], and how the compiler schedules it."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


_LEAST = 16  # a matrix instruction takes no less
_SHARED_MEMORY = 232_448  # bytes that one program may use on an H100 or H200, where the device does not say


def tiles(kernel: Kernel, x: Tensor, row_tile: int, columns: int, inner: int) -> Tiles:
    """Tiles of a product of `x`'s type with `columns` columns, summing over `inner`.

    `row_tile` is that of the routed rows (`row_tile`), or for the weight gradients the number of rows of the gradient.
    """
    chosen = preferred(kernel, x.dtype)
    chosen = chosen._replace(
        rows=min(chosen.rows, pow2(row_tile)) if kernel == "weight_gradient" else row_tile,
        columns=min(chosen.columns, pow2(columns)),
        inner=min(chosen.inner, pow2(inner)),
    )
    return fitted(chosen, kernel, x.element_size(), _shared_memory(x.device))


def row_tile(x: Tensor, choices: int, experts: int) -> int:
    """Rows of one tile of the routed rows; the same for all products of a layer, which share the table of tiles."""
    return min(preferred("up", x.dtype).rows, pow2(choices // experts))


def pow2(size: int) -> int:
    """The power of two that holds `size`, and that a matrix instruction takes."""
    return max(_LEAST, 1 << max(0, size - 1).bit_length())


def precision() -> str:
    """How fp32 products are made: as `torch.set_float32_matmul_precision` says."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def preferred(kernel: Kernel, dtype: torch.dtype) -> Tiles:
    """For products that are large in every dim.

    16 bit: 64 K fp32 sums spread over 8 warps take half of the registers; more than one stage hides the loads.
    """
    if dtype == torch.float32:
        return Tiles(rows=64, columns=64, inner=32, warps=4, stages=3)
    if kernel in ("up", "down_backward"):  # two tiles of sums, or a long epilogue
        return Tiles(rows=128, columns=128, inner=64, warps=8, stages=3)
    return Tiles(rows=128, columns=256, inner=64, warps=8, stages=3)


def fitted(chosen: Tiles, kernel: Kernel, element_size: int, memory: int) -> Tiles:
    """With as many stages as the chip's shared memory holds, and smaller tiles where it does not hold one."""
    products = 2 if kernel == "up" else 1
    while True:
        stage = (chosen.rows + products * chosen.columns) * chosen.inner * element_size
        if stage <= memory or chosen.inner == _LEAST:
            return chosen._replace(stages=max(1, min(chosen.stages, memory // stage)))
        chosen = chosen._replace(inner=chosen.inner // 2)


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return _SHARED_MEMORY
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SHARED_MEMORY)
