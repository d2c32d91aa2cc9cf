"""The ranks of one machine: started under TorchElastic, they meet at a store in this process, which only it reaches."""

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from optimus import functions
from optimus.errors import UserError
from optimus.launch.messages import explain
from optimus.launch.store import LOOPBACK, serve
from optimus.observe.terminal import let_go_if_gone
from optimus.resilience.exits import SAVING, STOPPED, told_torch_elastic

RANK = "optimus.launch.rank"  # the program that is a rank
BACKEND = "optimus-local"  # among those of TorchElastic


class LocalRendezvous(StaticTCPRendezvous):
    """That of a single node. The store of its base listens on all interfaces."""

    def __init__(self, params: rendezvous.RendezvousParameters) -> None:
        self._served = serve(0)
        super().__init__(LOOPBACK, self._served.port, rank=0, world_size=1, run_id=params.run_id, timeout=0)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        return rendezvous.RendezvousInfo(self._served, 0, 1, rendezvous.RendezvousStoreInfo(LOOPBACK, self.master_port))


def register() -> str:
    """Make it known to TorchElastic; returns the name of the backend."""
    rendezvous.rendezvous_handler_registry.register(BACKEND, LocalRendezvous)
    return BACKEND


def name_interface(address: str) -> None:
    """Let Gloo use this machine's network of `address`; left to itself it looks up the machine's name, which may be of
    another one."""
    for device, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", device)


def start_ranks(config: str, resume: bool, ranks: int, holder: str, hooks: Sequence[Any] = ()) -> int:
    """Start the ranks on this machine, each a program, and wait for them.

    Returns the signal that has ended the run before its end, or 0.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says of a failed rank, we say
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config, encoding="utf-8")
        words = [str(file), *rank_options(holder), *(["--resume"] if resume else [])]
        if hooks:
            words += ["--hooks", str(Path(folder) / "hooks")]
            Path(words[-1]).write_bytes(functions.dumps([*hooks], "a hook of `hooks`"))
        launch = LaunchConfig(  # its endpoint is the store's own
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(folder),  # else it makes one of its own, and leaves it
            run_id=uuid.uuid4().hex,
            rdzv_backend=register(),
            local_addr=LOOPBACK,
            max_restarts=0,
        )
        # Attributes that older versions do not know.
        launch.signals_to_handle = told_torch_elastic()
        launch.shutdown_timeout = SAVING
        try:
            elastic_launch(launch, sys.executable)("-m", RANK, *words)
        except SignalException as error:
            let_go_if_gone()
            return error.sigval  # the ranks have had it too: they finish their step and save
        except ChildFailedError as error:
            if stopped := {failure.exitcode for failure in error.failures.values()} & set(STOPPED):
                return max(stopped) - 128  # one of them was told to end, and they have agreed
            raise UserError(explain(error.failures)) from error
    return 0


def rank_options(holder: str | None = None) -> list[str]:
    """Those of every rank that this process starts: the token of the run folder's lease, and the parent to end with."""
    return ["--parent", str(os.getpid()), *([] if holder is None else ["--holder", holder])]
