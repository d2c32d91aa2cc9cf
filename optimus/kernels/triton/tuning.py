"""Launch settings of the experts' kernels: tile sizes, numbers of programs, and the use of TMA and atomics."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus.kernels import devices
from optimus.kernels.devices import Chip

Kernel = Literal["up", "down", "down_backward", "up_backward", "weight_gradient"]


class Tiles(NamedTuple):
    """The shape of a tile's matmul step [rows, inner] @ [inner, columns], and Triton's `num_warps` and `num_stages`."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


_LEAST = 16  # the smallest tile size in each dim, a size that `tl.dot` supports

# Tiles for matmuls in 16 bits that are large in every dim. A program of "up" computes `columns` columns of gate and the
# same columns of up.
_PREFERRED: dict[str, dict[Kernel, Tiles]] = {
    "sm_90": {
        "up": Tiles(128, 128, 64, 8, 4),
        "down": Tiles(128, 256, 64, 8, 4),
        "down_backward": Tiles(128, 256, 64, 8, 4),
        "up_backward": Tiles(128, 256, 64, 8, 4),
        "weight_gradient": Tiles(128, 256, 64, 8, 4),
    },
    "sm_80": {
        "up": Tiles(128, 128, 32, 8, 4),
        "down": Tiles(128, 256, 32, 8, 4),
        "down_backward": Tiles(128, 128, 64, 8, 4),
        "up_backward": Tiles(128, 256, 32, 8, 4),
        "weight_gradient": Tiles(128, 128, 64, 8, 4),
    },
    "gfx942": {
        "up": Tiles(128, 128, 64, 8, 2),
        "down": Tiles(128, 256, 64, 8, 2),
        "down_backward": Tiles(128, 128, 64, 8, 2),
        "up_backward": Tiles(128, 256, 64, 8, 2),
        "weight_gradient": Tiles(128, 256, 32, 8, 2),
    },
    "unknown": {
        "up": Tiles(128, 64, 32, 8, 2),
        "down": Tiles(128, 128, 32, 8, 2),
        "down_backward": Tiles(128, 128, 32, 8, 2),
        "up_backward": Tiles(128, 128, 32, 8, 2),
        "weight_gradient": Tiles(128, 128, 32, 8, 2),
    },
}
_AS = {"sm_100": "sm_90", "gfx90a": "gfx942", "gfx950": "gfx942"}
_PREFERRED_FP32 = Tiles(rows=64, columns=64, inner=32, warps=4, stages=3)


def tiles(kernel: Kernel, x: Tensor, row_tile: int, columns: int, inner: int) -> Tiles:
    """Returns the tiles of the matmul of `kernel` in the dtype of `x`.

    `columns` is the number of the result's columns (for "up", of gate alone). `inner` is the size of the inner dim, and
    `row_tile` the number of routed rows per tile. For weight gradients, `row_tile` is the number of rows of the
    gradient, and `inner` is the number of routed rows per tile.
    """
    chip = devices.chip_of(x.device)
    chosen = preferred(kernel, x.dtype, chip)
    chosen = chosen._replace(
        rows=min(chosen.rows, pow2(row_tile)) if kernel == "weight_gradient" else row_tile,
        columns=min(chosen.columns, pow2(columns)),
        inner=min(chosen.inner, pow2(inner)),
    )
    return fitted(chosen, kernel, x.element_size(), chip)


def row_tile(x: Tensor, choices: int, experts: int) -> int:
    """Returns the number of routed rows per tile: at most `pow2` of the mean number of rows per expert."""
    return min(preferred("up", x.dtype, devices.chip_of(x.device)).rows, pow2(choices // experts))


def pow2(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and at least `_LEAST`."""
    return max(_LEAST, 1 << max(0, size - 1).bit_length())


def precision() -> str:
    """Returns Triton's `input_precision` for torch's fp32 matmul precision: "tf32" for both "high" and "medium"."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def preferred(kernel: Kernel, dtype: torch.dtype, chip: Chip) -> Tiles:
    """Returns the tiles for matmuls that are large in every dim."""
    if dtype == torch.float32:
        return _PREFERRED_FP32
    name = _AS.get(chip.architecture, chip.architecture)
    return _PREFERRED.get(name, _PREFERRED["unknown"])[kernel]


def fitted(chosen: Tiles, kernel: Kernel, element_size: int, chip: Chip) -> Tiles:
    """Limits the stages to the chip's shared memory; first halves `inner`, down to `_LEAST`, until one stage fits."""
    while stage_bytes(chosen, kernel, element_size) > chip.shared_memory and chosen.inner > _LEAST:
        chosen = chosen._replace(inner=chosen.inner // 2)
    buffers = chip.shared_memory // stage_bytes(chosen, kernel, element_size)
    # On chips without TMA, the last stage is in registers.
    return chosen._replace(stages=max(1, min(chosen.stages, buffers + (not chip.tma))))


def stage_bytes(tiles: Tiles, kernel: Kernel, element_size: int) -> int:
    """Returns the bytes of shared memory for one pipeline stage of the loads."""
    return (tiles.rows + (2 if kernel == "up" else 1) * tiles.columns) * tiles.inner * element_size


def by_descriptors(*tensors: Tensor) -> bool:
    """Returns True if kernels may read tiles of these tensors by TMA; False for dtypes that do not have 16 bits.

    The caller must pass tensors with a contiguous last dim. TMA needs a first address, and strides of the other dims,
    that are multiples of 16 bytes.
    """
    return devices.chip_of(tensors[0].device).tma and all(
        t.element_size() == 2 and t.numel() and not any(n % 8 for n in (*t.stride()[:-1], t.storage_offset()))
        for t in tensors
    )


def adds_in_memory(into: Tensor) -> bool:
    """Returns True if `into` is in fp32 and its chip can add fp32 numbers to memory atomically."""
    return into.dtype == torch.float32 and devices.chip_of(into.device).adds


def programs(x: Tensor, work: int) -> int:
    """Returns the number of programs for `work` tiles: one per tile, but at most one per processor on chips with TMA.

    Returns at least 1.
    """
    chip = devices.chip_of(x.device)
    return max(1, min(work, chip.processors) if chip.tma else work)
