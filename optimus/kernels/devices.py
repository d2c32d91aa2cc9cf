"""Properties of accelerators.

Sources: CUDA C++ programming guide, "Technical specifications per compute capability"; AMD CDNA 2 and 3 instruction set
references; Intel Data Center GPU Max architecture overview; data sheets for memory.
"""

from functools import cache
from typing import Any, NamedTuple

import torch


class Chip(NamedTuple):
    architecture: str  # the compiler's name of the architecture
    product: str
    processors: int  # number of multiprocessors, compute units or Xe cores
    shared_memory: int  # bytes that one program may use (shared memory, LDS, SLM)
    warp: int
    registers: int  # number of 32-bit registers that one thread may use
    tma: bool  # True if the chip has a tensor memory accelerator (NVIDIA), which copies tiles
    adds: bool  # True if kernels may add fp32 numbers to device memory atomically
    memory: int  # bytes of device memory


_KIB, _GIB = 1 << 10, 1 << 30

CHIPS = {
    chip.architecture: chip
    for chip in (
        Chip("sm_80", "A100 80GB", 108, 163 * _KIB, 32, 255, False, True, 80 * _GIB),
        Chip("sm_90", "H200", 132, 227 * _KIB, 32, 255, True, True, 141 * _GIB),
        Chip("sm_100", "B200", 148, 227 * _KIB, 32, 255, True, True, 180 * _GIB),
        Chip("gfx90a", "MI250X, one of two dies", 110, 64 * _KIB, 64, 512, False, False, 64 * _GIB),
        Chip("gfx942", "MI300X", 304, 64 * _KIB, 64, 512, False, True, 192 * _GIB),
        Chip("pvc", "Data Center GPU Max 1550, one of two tiles", 64, 128 * _KIB, 16, 256, False, False, 64 * _GIB),
    )
}
UNKNOWN = Chip("unknown", "", 64, 48 * _KIB, 32, 255, False, False, 16 * _GIB)


def chip_of(device: torch.device) -> Chip:
    """Returns the properties of a device; `UNKNOWN` for the CPU and the meta device."""
    if device.type in ("cpu", "meta"):
        return UNKNOWN
    return _chip(
        device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())
    )


@cache
def _chip(device: torch.device) -> Chip:
    return chip_from(torch.get_device_module(device).get_device_properties(device))


def chip_from(properties: Any) -> Chip:
    """Returns the chip that torch's device `properties` describe.

    Missing properties come from the architecture's row in `CHIPS`, or from `UNKNOWN`.
    """
    chip = CHIPS.get(_architecture(properties), UNKNOWN._replace(architecture=_architecture(properties)))
    said: dict[str, Any] = {
        "processors": getattr(properties, "multi_processor_count", 0) or getattr(properties, "gpu_subslice_count", 0),
        "shared_memory": getattr(properties, "shared_memory_per_block_optin", 0),
        "warp": getattr(properties, "warp_size", 0),
        "memory": getattr(properties, "total_memory", 0),
    }
    return chip._replace(**{name: value for name, value in said.items() if value})


def _architecture(properties: Any) -> str:
    gfx = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    if gfx.startswith("gfx"):  # on NVIDIA's devices, this field is the name of the device
        return gfx
    if hasattr(properties, "major"):
        return f"sm_{properties.major}{properties.minor}"
    return "pvc" if "Data Center GPU Max" in str(getattr(properties, "name", "")) else "unknown"
