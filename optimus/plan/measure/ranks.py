"""Runs a function on ranks in fresh processes, or on the ranks of torchrun."""

import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import multiprocessing

from optimus import functions
from optimus.errors import UserError
from optimus.observe.machine import find_device, use_device

T = TypeVar("T")
_MOST_RANKS = 64


def on_ranks(function: Callable[..., T], ranks: int, *args: Any) -> T | None:
    """Runs `function(ranks, *args)` on `ranks` fresh ranks of this machine, and returns the result of the first rank.

    Under torchrun, the function runs on the ranks of torchrun, and all ranks but the first return None. Raises
    `UserError` for a number of ranks that this machine cannot have or, under torchrun, that a node does not have.
    """
    check_ranks(ranks)
    if not under_launcher():
        return run_fresh(function, ranks, ranks, *args, backend=_backend_of_device())[0]
    if ranks != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise UserError(
            f"--ranks {ranks}: torchrun has started {os.environ['LOCAL_WORLD_SIZE']} ranks on each node: give this number"
        )
    use_device("auto", "the device", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(_backend_of_device())
    try:
        found = function(ranks, *args)
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def check_ranks(ranks: int) -> None:
    """Raises `UserError` for a number of ranks that this machine cannot have."""
    if not 1 <= ranks <= _MOST_RANKS:
        raise UserError(f"--ranks {ranks}: a node has 1 to {_MOST_RANKS} ranks")
    if torch.accelerator.is_available() and ranks > torch.accelerator.device_count():
        raise UserError(
            f"--ranks {ranks}: this machine has {torch.accelerator.device_count()} accelerators, at most one rank for each"
        )


def under_launcher() -> bool:
    """True if torchrun, or a launcher that sets the same variables, has started this process."""
    return "LOCAL_WORLD_SIZE" in os.environ and "WORLD_SIZE" in os.environ


def _backend_of_device() -> str:
    device = find_device("auto", "the device")
    try:
        return str(dist.get_default_backend_for_device(device))
    except ValueError as error:
        raise UserError(f"this build of torch has no collectives for the device {device.type}: {error}") from error


def run_fresh(function: Callable[..., T], ranks: int, *args: Any, backend: str = "gloo") -> list[T]:
    """Runs `function(*args)` on every rank of a process group on this machine, and returns the results by rank.

    Raises:
        UserError: `function` or `args` cannot be pickled.
        torch.multiprocessing.ProcessRaisedException: a rank raised an exception.
    """
    work = functions.dumps((function, args), f"the arguments of {function.__name__}")
    multiprocessing.set_forkserver_preload([getattr(function, "__module__", "torch")])
    with TemporaryDirectory() as folder:
        multiprocessing.start_processes(_rank, (ranks, folder, work, backend), nprocs=ranks, start_method="forkserver")
        return [functions.loads(_result(folder, rank).read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work: bytes, backend: str) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise Gloo resolves the machine's name
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
    }  # DeepSpeed reads these variables
    warnings.simplefilter("ignore", FutureWarning)  # other libraries use deprecated parts of PyTorch
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    function, args = functions.loads(work)
    _result(folder, rank).write_bytes(functions.dumps(function(*args)))
    gc.collect()  # Gloo's pending work must not outlive its process group
    dist.barrier()  # a rank that leaves early breaks its peers' last collective
    dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result{rank}"
