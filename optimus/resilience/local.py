"""Where the ranks of one machine meet: a store in the launcher, which only this machine reaches."""

import os

import psutil
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from optimus.resilience.store import LOOPBACK, serve

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
