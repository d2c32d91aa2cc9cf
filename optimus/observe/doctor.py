"""Examines the resources of this machine that a run needs."""

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from optimus.config.sizes import size_text
from optimus.cores import usable_cores
from optimus.disk import file_system_time, user_path
from optimus.errors import first_line
from optimus.observe.machine import describe_machine, free_memory, versions

_TRIAL = 64 << 20  # bytes that the check of the file system writes
_SLOW = 50e6  # bytes/s; the check warns of a slower file system
_SKEW = 2.0  # maximum seconds between this machine's clock and the file system's clock
_FILES, _SHARED = 4096, 64 << 20  # smallest adequate limit of open files, and free bytes of shared memory
_LEAST_FREE = 10 << 30
_CANNOT_WRITE = "make room, or choose another folder"

Status = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """A result of a check. `mend` names the cure."""

    what: str
    status: Status
    found: str
    mend: str = ""


def _judged(what: str, wrong: bool, found: str, mend: str, status: Status = "warning") -> Finding:
    return Finding(what, status, found, mend) if wrong else Finding(what, "ok", found)


def examine(folder: str | Path = ".") -> list[Finding]:
    """Runs all checks and returns their findings. `folder` is the folder for future runs; if `folder` does not exist,
    the checks use its nearest existing parent.

    A finding has the subject of the check (`what`), the `status` (ok, warning, problem), the result (`found`), and the
    cure of a fault (`mend`).

    Example:
        [finding for finding in api.doctor("runs") if finding.status != "ok"]
    """
    parent = user_path(folder).absolute()
    while not parent.is_dir():
        parent = parent.parent
    checks: list[Callable[[], Iterator[Finding]]] = [
        _versions, _devices, _memory, _interconnect, lambda: _file_system(parent), lambda: _clock(parent), _limits,
    ]  # fmt: skip
    return [finding for check in checks for finding in check()]


def _versions() -> Iterator[Finding]:
    found = versions("numpy", "triton")
    yield Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))
    if found["triton"] == "not installed" and describe_machine()["accelerators"]:
        yield Finding(
            "triton",
            "warning",
            "not installed",
            "install the triton version of this torch, because its kernels are faster",
        )


def _devices() -> Iterator[Finding]:
    import torch

    here = describe_machine()
    yield Finding("processor", "ok", f"{here['cpu']}, {here['cores']} usable cores")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and threads.isdecimal() and int(threads) > usable_cores():
        mend = f"set OMP_NUM_THREADS to at most {usable_cores()} divided by the ranks of a node"
        yield Finding(
            "threads", "warning", f"OMP_NUM_THREADS is {threads}, but there are {usable_cores()} usable cores", mend
        )
    if not here["accelerators"]:
        yield Finding("accelerators", "ok", f"torch {torch.__version__} finds none: runs use the CPU")
    for index, name in enumerate(here["accelerators"]):
        device = torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]
        try:
            ones = torch.ones(256, 256, device=device)
            wrong = float((ones @ ones).sum()) != 256.0**3
            found = f"{name}, {size_text(free_memory(device))} free"
            mend = "it computes wrong sums: take it out of service"
            yield _judged(f"accelerator {index}", wrong, found, mend, "problem")
        except RuntimeError as error:
            mend = "check its driver, and which other processes use it"
            yield Finding(f"accelerator {index}", "problem", f"{name}: {first_line(error)}", mend)


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{size_text(memory.available)} of {size_text(memory.total)} available"
    yield _judged("memory", memory.available < memory.total / 4, found, "end other processes that use memory")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free, mend = shutil.disk_usage(shared).free, "enlarge it (docker run --shm-size=1g)"
        yield _judged("shared memory", free < _SHARED, f"{size_text(free)} free in /dev/shm", mend)


def _interconnect(network: Path = Path("/sys/class/net")) -> Iterator[Finding]:
    import torch.distributed as dist

    usable = [
        name
        for name in ("nccl", "xccl", "gloo", "mpi")
        if dist.is_available() and getattr(dist, f"is_{name}_available", lambda: False)()
    ]
    has, mend = ", ".join(usable) or "no backend", "install a torch that is built with torch.distributed"
    yield _judged("collectives", not usable, f"torch has {has}", mend, "problem")
    speeds = []
    for device in sorted(network.iterdir()) if network.is_dir() else ():
        try:
            speed = int((device / "speed").read_text())
        except (OSError, ValueError):  # an interface without a known speed, such as the loopback
            continue
        if speed > 0:
            speeds.append(f"{device.name} {speed / 1000:g} Gbit/s")
    fabric = Path("/sys/class/infiniband")
    speeds += [f"{device.name} (InfiniBand or RoCE)" for device in sorted(fabric.iterdir())] if fabric.is_dir() else []
    yield Finding(
        "network", "ok", ", ".join(speeds) or "no interface reports its speed: runs on several nodes need a network"
    )


def _file_system(folder: Path) -> Iterator[Finding]:
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            "permissions", "problem", f"you may not write to {folder}", "change them, or choose another folder"
        )
        return
    yield Finding("permissions", "ok", f"{folder} can be written")
    free = shutil.disk_usage(folder).free
    mend = "make room: a checkpoint takes 12 to 16 bytes per parameter"
    yield _judged("room", free < _LEAST_FREE, f"{size_text(free)} free", mend)
    data = os.urandom(1 << 20)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            began = time.perf_counter()
            for _ in range(_TRIAL // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            rate = _TRIAL / (time.perf_counter() - began)
    except OSError as error:
        yield Finding("file system", "problem", f"cannot write: {error.strerror or error}", _CANNOT_WRITE)
        return
    mend = "choose a faster file system, or set checkpoint.asynchronous=true"
    yield _judged("file system", rate < _SLOW, f"{size_text(int(rate))}/s written", mend)


def _clock(folder: Path) -> Iterator[Finding]:
    if os.access(folder, os.W_OK | os.X_OK):
        try:
            skew = file_system_time(folder) - time.time()
        except OSError as error:
            yield Finding("clock", "problem", f"cannot write: {error.strerror or error}", _CANNOT_WRITE)
        else:
            found = f"differs from the file system's clock by {abs(skew):.1f} s"
            mend = "set both clocks by NTP: leases and events are compared by time"
            yield _judged("clock", abs(skew) > _SKEW, found, mend)
    try:
        command = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return
    if said == "no":
        yield Finding("clock synchronisation", "warning", "NTP is off", "enable NTP: timedatectl set-ntp true")


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _judged("open files", files < _FILES, f"at most {files:,}", f"raise the limit: ulimit -n {_FILES}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        yield Finding(
            "locked memory",
            "warning",
            size_text(locked),
            "InfiniBand needs unlimited locked memory: ulimit -l unlimited",
        )
