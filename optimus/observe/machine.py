"""What the machine is: peak arithmetic where it is known, free memory, versions."""

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

# Instructions of processors that multiply bf16, as torch and the kernel (/proc/cpuinfo) call them.
_BFLOAT16 = {
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX512-BF16",
    "sve_bf16": "SVE BF16",
    "svebf16": "SVE BF16",
}
# By variables of the environment the values with which torch leaves them unused: ATen in attention and what is done element
# by element, oneDNN in products. The later of oneDNN's names counts only without the other.
_WITHOUT_BFLOAT16 = {
    "ATEN_CPU_CAPABILITY": {"default", "avx2"},
    "ONEDNN_MAX_CPU_ISA": {
        "sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni", "advsimd",
    },
}  # fmt: skip
_OLDER_NAMES = {"ONEDNN_MAX_CPU_ISA": "DNNL_MAX_CPU_ISA"}


class Bfloat16(NamedTuple):
    """Whether a device multiplies bf16 itself, and what that is known by."""

    native: bool
    why: str


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


def bfloat16_of(device: Any) -> Bfloat16:
    """Whether a torch device computes in bf16: by what it is, so that it is the same whatever else runs."""
    import torch

    if device.type == "cpu":
        return _bfloat16_of_cpu()
    module = torch.get_device_module(device)
    try:
        native = bool(module.is_bf16_supported(including_emulation=False))
    except (AttributeError, TypeError):  # other makers' have no emulation, or no such function
        native = bool(getattr(module, "is_bf16_supported", lambda: False)())
    return Bfloat16(native, f"{device.type} computes in it" if native else "no bfloat16 there")


def _bfloat16_of_cpu() -> Bfloat16:
    """Without such instructions products in bf16 take several times as long as in fp32, as they are emulated."""
    import torch

    features = _cpu_features()
    name = next((text for feature, text in _BFLOAT16.items() if feature in features), None)
    if name is None or not torch.backends.mkldnn.is_available():
        return Bfloat16(False, "the processor has no instructions for bfloat16 that torch uses")
    for variable, without in _WITHOUT_BFLOAT16.items():
        variable = variable if variable in os.environ else _OLDER_NAMES.get(variable, variable)
        if (value := os.environ.get(variable, "")).lower() in without:
            return Bfloat16(False, f"{variable}={value} keeps torch from the processor's {name}")
    return Bfloat16(True, f"the processor has {name}")


def _cpu_features() -> set[str]:
    """Of the processor, as torch tells of them, or before it did the kernel."""
    import torch

    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, there in torch.cpu.get_capabilities().items() if there is True}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:
        return set()


def free_memory(device: Any) -> int:
    """Bytes that can still be allocated on a torch device, when what earlier runs of this process have left is freed."""
    import torch

    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    module = torch.get_device_module(device)
    gc.collect()  # modules and their state refer to each other
    module.empty_cache()
    return int(module.mem_get_info(device)[0])


def whole_memory(device: Any) -> int:
    """Bytes that an accelerator has; nothing of it is taken to find out."""
    import torch

    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def measurements_of(device: Any, folder: str | None) -> Measurements:
    """What `folder` keeps of this chip: measurements of another one, PyTorch or number of threads are no guide."""
    if folder is None:
        return Measurements(None)
    import torch

    chip = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    threads = f"-{torch.get_num_threads()}-threads" if device.type == "cpu" else ""
    return Measurements(Path(folder) / f"measured-{chip}{threads}-torch-{torch.__version__}.json")


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
