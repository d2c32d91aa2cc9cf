"""Finds devices, and reports properties of devices, the machine and installed packages."""

import gc
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

from optimus.cores import usable_cores
from optimus.errors import UserError
from optimus.measurements import Measurements
from optimus.version import __version__

# Dense bf16 TFLOP/s from the makers' data sheets. The first key that is part of a device's name applies.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "V100": 125.0,  # in fp16, because the chip has no bf16
    "MI300X": 1307.0,
    "MI250X": 191.5,  # of one of the two chips
    "Data Center GPU Max 1550": 419.0,  # of one tile (Ponte Vecchio)
}

# Processor instructions that multiply bf16, by their names in torch and in Linux (/proc/cpuinfo).
_BFLOAT16 = {
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX512-BF16",
    "sve_bf16": "SVE BF16",
    "svebf16": "SVE BF16",
}
# Values of environment variables that keep torch from using bf16 instructions.
_WITHOUT_BFLOAT16 = {
    "ATEN_CPU_CAPABILITY": {"default", "avx2"},
    "ONEDNN_MAX_CPU_ISA": {
        "sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni", "advsimd",
    },
}  # fmt: skip
_OLDER_NAMES = {"ONEDNN_MAX_CPU_ISA": "DNNL_MAX_CPU_ISA"}


class Bfloat16(NamedTuple):
    """Support of a device for bf16, and the reason."""

    native: bool
    why: str


def find_device(name: str, setting: str, local_rank: int = 0) -> Any:
    """Finds the torch device of this name. `auto` is the machine's accelerator, or the CPU if there is no accelerator.
    An accelerator without an index in its name gets the index `local_rank`.

    Raises `UserError` for a name other than `auto`, `cpu` and the machine's accelerators. `setting` names the option
    in the error message.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    here = f"{torch.accelerator.device_count()} x {accelerator.type} and cpu" if accelerator else "cpu alone"
    try:
        asked = accelerator if name == "auto" else torch.device(name)
    except RuntimeError:
        asked = None
    if asked is not None and accelerator is not None and asked.type == accelerator.type:
        index = local_rank if asked.index is None else asked.index
        if index < torch.accelerator.device_count():
            return torch.device(asked.type, index)
        if asked.index is None:
            here += f"; ranks share a device that is named with its index, such as {asked.type}:0"
    raise UserError(f"{setting} '{name}' is not available: this machine has {here} (torch {torch.__version__})")


def use_device(name: str, setting: str, local_rank: int = 0) -> Any:
    """Finds a device as `find_device` does. An accelerator becomes this thread's current device.

    Call this function before any other use of a device: the first use allocates memory on the current device.
    """
    import torch

    device = find_device(name, setting, local_rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def peak_flops(device: Any) -> float | None:
    """Returns a torch device's peak FLOP/s in a 16-bit dtype; None if unknown."""
    name = device_name(device)
    return next((tflops * 1e12 for word, tflops in _PEAK_TFLOPS.items() if word in name), None)


def device_name(device: Any) -> str:
    """Returns the product name of a torch device, or the architecture for a CPU without a known name."""
    import torch

    if device.type == "cpu":
        return _cpu_name()
    return str(torch.get_device_module(device).get_device_name(device))


def bfloat16_of(device: Any) -> Bfloat16:
    """Checks if a torch device computes natively in bf16."""
    import torch

    if device.type == "cpu":
        return _bfloat16_of_cpu()
    module = torch.get_device_module(device)
    try:
        native = bool(module.is_bf16_supported(including_emulation=False))
    except (AttributeError, TypeError):  # modules of other vendors have no such argument, or no such function
        native = bool(getattr(module, "is_bf16_supported", lambda: False)())
    return Bfloat16(native, f"{device.type} computes in bfloat16" if native else f"{device.type} has no bfloat16")


def _bfloat16_of_cpu() -> Bfloat16:
    import torch

    features = _cpu_features()
    name = next((text for feature, text in _BFLOAT16.items() if feature in features), None)
    if name is None or not torch.backends.mkldnn.is_available():
        return Bfloat16(False, "the processor has no instructions for bfloat16 that torch uses")
    for variable, without in _WITHOUT_BFLOAT16.items():
        variable = variable if variable in os.environ else _OLDER_NAMES.get(variable, variable)
        if (value := os.environ.get(variable, "")).lower() in without:
            return Bfloat16(False, f"{variable}={value} keeps torch from using the processor's {name}")
    return Bfloat16(True, f"the processor has {name}")


def _cpu_features() -> set[str]:
    """Returns the processor's features from torch, or from Linux with an older torch."""
    import torch

    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, there in torch.cpu.get_capabilities().items() if there is True}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:
        return set()


def free_memory(device: Any) -> int:
    """Returns the bytes of free memory on a torch device. On an accelerator, first frees memory that this process no
    longer uses."""
    import torch

    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    module = torch.get_device_module(device)
    gc.collect()  # models and their state form reference cycles
    module.empty_cache()
    return int(module.mem_get_info(device)[0])


def total_memory(device: Any) -> int:
    """Returns the total bytes of an accelerator."""
    import torch

    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def measurements_of(device: Any, folder: str | None) -> Measurements:
    """Opens the measurements of this device and PyTorch version in `folder`, or empty measurements without a folder.

    On a CPU, the measurements also depend on the number of torch threads.
    """
    if folder is None:
        return Measurements(None)
    import torch

    chip = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    threads = f"-{torch.get_num_threads()}-threads" if device.type == "cpu" else ""
    return Measurements(Path(folder) / f"measured-{chip}{threads}-torch-{torch.__version__}.json")


def describe_machine() -> dict[str, Any]:
    """Describes the operating system, processor, usable cores, memory and accelerators."""
    import psutil
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": [device_name(accelerator)] * torch.accelerator.device_count() if accelerator else [],
    }


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, this package, torch and `packages`; "not installed" for a missing package."""
    found = {"python": platform.python_version(), "optimus": __version__}
    for package in ("torch", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
