"""Where the ranks of one machine meet: a store in the launcher, which only this machine reaches."""

import os

import psutil
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from optimus.resilience.store import LOOPBACK, serve

BACKEND = "optimus-local"  # among those of TorchElastic


class LocalRendezvous(RendezvousHandler):
    """That of a single node. TorchElastic's own listens on all interfaces and unpickles what it reads."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._store = serve(0)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store, too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else would come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> str:
    """Make it known to TorchElastic; returns the name of the backend."""
    rendezvous_handler_registry.register(BACKEND, LocalRendezvous)
    return BACKEND


def name_interface(address: str) -> None:
    """Let Gloo use this machine's network of `address`; left to itself it looks up the machine's name, which may be of
    another one."""
    for device, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
