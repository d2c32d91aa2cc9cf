"""Launch of ranks on one machine under TorchElastic."""

import logging
import os
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from optimus.errors import UserError
from optimus.launch.messages import explain
from optimus.launch.store import LOOPBACK, serve
from optimus.observe.terminal import let_go_if_gone
from optimus.resilience.exits import SAVING, STOPPED, told_torch_elastic

RANK = "optimus.launch.rank"
BACKEND = "optimus-local"  # name of the rendezvous backend in TorchElastic


class LocalRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single node. The store listens on the loopback interface; the store of the base class
    listens on all interfaces.
    """

    def __init__(self, params: rendezvous.RendezvousParameters) -> None:
        self._served = serve(0)
        super().__init__(LOOPBACK, self._served.port, rank=0, world_size=1, run_id=params.run_id, timeout=0)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        return rendezvous.RendezvousInfo(self._served, 0, 1, rendezvous.RendezvousStoreInfo(LOOPBACK, self.master_port))


def register() -> str:
    """Registers `LocalRendezvous` with TorchElastic, and returns the name of the backend."""
    rendezvous.rendezvous_handler_registry.register(BACKEND, LocalRendezvous)
    return BACKEND


def name_interface(address: str) -> None:
    """Makes Gloo use the network interface that has `address`, unless the environment names an interface."""
    for device, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", device)


def start_ranks(config: str, resume: bool, ranks: int, holder: str, objects: bytes | None = None) -> int:
    """Starts the ranks on this machine, each as a process, and waits for all ranks. `objects` is a result of
    `UserObjects.dumps`.

    Returns the signal that has ended the run early, or 0. Raises `UserError` when a rank has failed.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `explain` reports failed ranks
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config, encoding="utf-8")
        words = [str(file), *rank_options(holder), *(["--resume"] if resume else [])]
        if objects is not None:
            words += ["--objects", str(Path(folder) / "objects")]
            Path(words[-1]).write_bytes(objects)
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(folder),  # by default, TorchElastic creates a folder that stays
            run_id=uuid.uuid4().hex,
            rdzv_backend=register(),
            local_addr=LOOPBACK,
            max_restarts=0,
        )
        # Older versions of torch do not accept these values as arguments.
        launch.signals_to_handle = told_torch_elastic()
        launch.shutdown_timeout = SAVING
        try:
            elastic_launch(launch, sys.executable)("-m", RANK, *words)
        except SignalException as error:
            let_go_if_gone()
            return error.sigval  # the ranks have received the signal too
        except ChildFailedError as error:
            if stopped := {failure.exitcode for failure in error.failures.values()} & set(STOPPED):
                return max(stopped) - 128  # a rank has received a signal
            raise UserError(explain(error.failures)) from error
    return 0


def rank_options(holder: str | None = None) -> list[str]:
    """Returns a rank's options: the id of this process and, if given, the token of the lease."""
    return ["--parent", str(os.getpid()), *([] if holder is None else ["--holder", holder])]
