"""What the machine is: peak arithmetic where it is known, free memory, versions."""

import importlib.metadata
import platform
from typing import Any

from optimus import __version__
from optimus.cores import usable_cores
from optimus.errors import UserError

# Dense bf16 TFLOP/s from the makers' data sheets; a device's name is searched for these words in order.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "V100": 125.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,  # one of the two chips, which is what a rank gets
    "Data Center GPU Max 1550": 419.0,  # one tile (Ponte Vecchio)
}


def find_device(name: str, setting: str, local_rank: int = 0) -> Any:
    """The torch device of this name; `auto` is the accelerator of this local rank where there is one, else the CPU.

    Raises `UserError`, naming the `setting` that asked for it, when the device is not there.
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
            here += f"; ranks share a device that is named with its index, as {asked.type}:0"
    raise UserError(f"{setting} '{name}' is not here: this machine has {here} (torch {torch.__version__})")


def use_device(name: str, setting: str, local_rank: int = 0) -> Any:
    """`find_device`, which this thread uses from now on: what is launched without a word about devices is launched there.

    To be called before anything else asks a device: whoever asks one of them has memory taken on it.
    """
    import torch

    device = find_device(name, setting, local_rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def peak_flops(device: Any) -> float | None:
    """Peak bf16 operations per second of a torch device; None where it is not known (CPUs among others)."""
    name = device_name(device)
    return next((tflops * 1e12 for word, tflops in _PEAK_TFLOPS.items() if word in name), None)


def device_name(device: Any) -> str:
    """The product name of a torch device."""
    import torch

    if device.type == "cpu":
        return _cpu_name()
    return str(torch.get_device_module(device).get_device_name(device))


def free_memory(device: Any) -> int:
    """Bytes that can still be allocated on a torch device."""
    import torch

    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def whole_memory(device: Any) -> int:
    """Bytes that an accelerator has; nothing of it is taken to find out."""
    import torch

    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerators; for reports."""
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
    """Versions of Python and of this package, and of torch and `packages` as they are installed."""
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
