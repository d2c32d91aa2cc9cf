"""Run a function on ranks whose processes have done nothing else, so that their memory and speed are the function's own.

`optimus.testing.run_ranks` uses its processes again, whose heaps have grown and whose libraries have compiled kernels.
"""

import gc
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from optimus import functions

T = TypeVar("T")


def run_fresh(function: Callable[..., T], ranks: int, *args: Any, backend: str = "gloo") -> list[T]:
    """`function(*args)` on every rank of a process group on this machine, by default of Gloo; the results by rank.

    `function` is at the top level of a module. The machine's cores are divided among the ranks, each having one thread
    at least.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised, or lost a peer that did; its traceback is the message.
    """
    from torch import multiprocessing

    work = functions.dumps((function, args))
    # A fork server that has imported what the function needs gives a fresh process in a tenth of a second.
    multiprocessing.set_forkserver_preload([getattr(function, "__module__", "torch")])
    with TemporaryDirectory() as folder:
        multiprocessing.start_processes(_rank, (ranks, folder, work, backend), nprocs=ranks, start_method="forkserver")
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work: bytes, backend: str) -> None:
    import torch
    import torch.distributed as dist

    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else Gloo asks what the machine's name resolves to
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}  # DeepSpeed reads them
    warnings.simplefilter("ignore", FutureWarning)  # other libraries' use of what PyTorch deprecates
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    function, args = functions.loads(work)
    _result(folder, rank).write_bytes(pickle.dumps(function(*args)))
    gc.collect()  # what Gloo has under way must not outlive its process group
    dist.barrier()  # a rank that leaves early breaks its peers' last collective
    dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result{rank}"
