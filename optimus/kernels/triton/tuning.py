"""The tiles that each kernel works in: a table per architecture, chosen by type and size; no measuring while training.

Sizes depend on the layer's shape and on the power of two of the mean rows per expert, never on the exact number of tokens: a
batch of another length compiles nothing new. Whoever has a chip at hand times candidates (`testing/trial.py`) and writes the
winner into `_PREFERRED`.

Legend: T tokens, K experts per token, E experts.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus.kernels import devices
from optimus.kernels.devices import Chip

Kernel = Literal["up", "down", "down_backward", "up_backward", "weight_gradient"]


class Tiles(NamedTuple):
    """Shape of one program's product [rows, inner] @ [inner, columns], and how the compiler schedules it."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


_LEAST = 16  # a matrix instruction takes no less

# Of products in 16 bits that are large in every dim. 32 K fp32 sums over 8 warps of 32 threads take half of a thread's
# registers. "up" has gate and up of as many columns.
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
    """Tiles of a product of `x`'s type with `columns` columns, summing over `inner`.

    `row_tile` is that of the routed rows (`row_tile`), or for the weight gradients the number of rows of the gradient.
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
    """Rows of one tile of the routed rows; the same for all products of a layer, which share the table of tiles."""
    return min(preferred("up", x.dtype, devices.chip_of(x.device)).rows, pow2(choices // experts))


def pow2(size: int) -> int:
    """The power of two that holds `size`, and that a matrix instruction takes."""
    return max(_LEAST, 1 << max(0, size - 1).bit_length())


def precision() -> str:
    """How fp32 products are made: as `torch.set_float32_matmul_precision` says."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def preferred(kernel: Kernel, dtype: torch.dtype, chip: Chip) -> Tiles:
    """For products that are large in every dim."""
    if dtype == torch.float32:
        return _PREFERRED_FP32
    name = _AS.get(chip.architecture, chip.architecture)
    return _PREFERRED.get(name, _PREFERRED["unknown"])[kernel]


def fitted(chosen: Tiles, kernel: Kernel, element_size: int, chip: Chip) -> Tiles:
    """With as many stages as the chip's shared memory holds, and smaller tiles where it does not hold one."""
    while stage_bytes(chosen, kernel, element_size) > chip.shared_memory and chosen.inner > _LEAST:
        chosen = chosen._replace(inner=chosen.inner // 2)
    buffers = chip.shared_memory // stage_bytes(chosen, kernel, element_size)
    return chosen._replace(stages=max(1, min(chosen.stages, buffers + (not chip.tma))))


def stage_bytes(tiles: Tiles, kernel: Kernel, element_size: int) -> int:
    """What one stage of the loads takes in shared memory; of s stages, s are there at a time on chips whose products read
    shared memory by themselves, as those with a copying unit do, elsewhere s - 1: the last is in registers."""
    return (tiles.rows + (2 if kernel == "up" else 1) * tiles.columns) * tiles.inner * element_size


def by_descriptors(*tensors: Tensor) -> bool:
    """Whether the chip's copying unit can read tiles of these, whose last dim lies in order: 16 bits, steps of 16 bytes."""
    return devices.chip_of(tensors[0].device).tma and all(
        t.element_size() == 2 and t.numel() and not any(n % 8 for n in (*t.stride()[:-1], t.storage_offset()))
        for t in tensors
    )


def adds_in_memory(into: Tensor) -> bool:
    """Whether sums are added to `into` by the chip's memory."""
    return into.dtype == torch.float32 and devices.chip_of(into.device).adds


def programs(x: Tensor, work: int) -> int:
    """Programs that share `work` tiles: one a processor where a unit fetches the next ahead, else one a tile."""
    chip = devices.chip_of(x.device)
    return max(1, min(work, chip.processors) if chip.tma else work)
