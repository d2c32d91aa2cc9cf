"""The phantom: an accelerator with host memory, threads as streams, and exact rules (see `device.cpp`).

`on_phantom` runs a function with the phantom as this process's accelerator. Each version of the source and of torch is
built once.
"""

import atexit
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch

from optimus.testing import run_ranks

T = TypeVar("T")
_SOURCE = Path(__file__).with_name("device.cpp")


class FaultError(AssertionError):
    """A use of the phantom that a real accelerator does not allow."""


def library() -> Path:
    """Returns the compiled phantom; skips the test if there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the phantom device needs g++ and Linux")
    key = hashlib.sha256(
        f"{torch.__version__} {sys.version} {_SOURCE.read_text(encoding='utf-8')}".encode()
    ).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optimus-phantom"
    built = cache / key[:16] / "phantom.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "phantom.so"
            subprocess.run([compiler, *_options(), "-o", str(made), str(_SOURCE), *_libraries()], check=True)
            built.parent.mkdir(exist_ok=True)
            os.replace(made, built)
    return built


def _options() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [
        "-shared",
        "-fPIC",
        "-O1",
        "-std=c++20",
        "-w",
        abi,
        "-DTORCH_EXTENSION_NAME=phantom",
        *(f"-I{each}" for each in folders),
    ]


def _libraries() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]


def load(built: Path) -> ModuleType:
    """Makes the phantom this process's accelerator for good; returns its controls."""
    import torch._meta_registrations  # shapes of operators that have Python rules only

    spec = importlib.util.spec_from_file_location("phantom", built)
    assert spec is not None
    assert spec.loader is not None
    torch.utils.rename_privateuse1_backend("phantom")
    controls = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(controls)
    device = ModuleType("torch.phantom")
    generator = torch.Generator()
    given: dict[str, Any] = {
        "controls": controls,
        "runs_triton": False,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "phantom",
        "mem_get_info": lambda device=None: controls.memory_info(),
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "manual_seed_all": generator.manual_seed,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
    }
    device.__dict__.update(given)
    torch._register_device_module("phantom", device)
    torch.empty(0, device="phantom")  # torch 2.11 does not wait for a device before its initialisation
    atexit.register(torch.accelerator.synchronize)  # its threads must end before the memory is freed
    return controls


def check() -> None:
    """Raises `FaultError` for rule violations since the last check."""
    torch.accelerator.synchronize()
    if faults := torch.get_device_module("phantom").controls.faults():
        raise FaultError("\n".join(faults))


def on_phantom(fn: Callable[..., T], ranks: int, *args: Any, timeout: float = 240.0) -> list[T]:
    """Runs as `run_ranks`, with each rank in its own process with the phantom; raises faults."""
    return run_ranks(_with_phantom, ranks, library(), fn, args, timeout=timeout, reuse=False)


def _with_phantom(built: Path, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    load(built)
    result = fn(*args)
    check()
    return result
