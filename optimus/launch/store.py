"""The store where nodes meet: a server of its own, so that no node of the run is a single point of failure.

Who reaches its port can read and change all that is in it (docs/security.md), so it listens on one address only.
"""

import errno
import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import TCPStore

from optimus.errors import UserError

LOOPBACK = "127.0.0.1"  # reached from this machine alone


def parse(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises `UserError`."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {endpoint}: give HOST:PORT, where `optimus rendezvous --port PORT` runs")
    return host, int(port)


def serve(port: int, address: str = LOOPBACK) -> TCPStore:
    """A store that others reach on this port of this machine's `address`, for as long as it is held; 0: any free port.

    Raises `UserError` when the port is taken or the address is none of this machine.
    """
    if not 0 <= port < 65536:
        raise UserError(f"--port {port}: give a number from 1 to 65535")
    number = _number_of(address)
    try:
        listening = socket.create_server((number, port), backlog=1024)
    except PermissionError as error:
        raise UserError(f"port {port} cannot be used here ({error}): choose a --port from 1024 on") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is not free here ({error}): choose another --port") from error
        raise UserError(
            f"--address {address}: this machine has no such address ({error}); `hostname -I` lists those it has"
        ) from error
    port = listening.getsockname()[1]
    # TCPStore itself listens on all interfaces.
    return TCPStore(number, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def serve_until_ended(port: int, address: str = LOOPBACK, as_json: bool = False) -> None:
    """`serve` until Ctrl-C or a termination signal, and say where, for people or as JSON. Raises as it does."""
    store = serve(port, address)
    alone = " of this machine alone (for others give --address)" if ip_address(_number_of(address)).is_loopback else ""
    text = f"nodes{alone} meet here on {address}:{store.port}; Ctrl-C ends it"
    print(json.dumps({"address": address, "port": store.port}) if as_json else text, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


def connect(endpoint: str, wait: float, waiting: Callable[[str], None] = lambda _: None) -> TCPStore:
    """The store at HOST:PORT; `waiting` is told, often, what is waited for.

    Raises `UserError` when nobody answers within `wait` seconds.
    """
    host, port = parse(endpoint)
    deadline = time.monotonic() + wait
    while True:
        try:  # the store's own attempts are counted in minutes, and their message is a page
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"nobody answers at the rendezvous {endpoint} ({error}): start `optimus rendezvous --port {port} "
                    f"--address {host}` on {host}"
                ) from error
            waiting(f"the rendezvous {endpoint}, where nobody answers, for {wait:g} s at most")
            time.sleep(0.5)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(60.0, wait)))


def own_address(endpoint: str) -> str:
    """The address by which this machine reaches the store, and others may reach it. Raises `UserError`."""
    host, port = parse(endpoint)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"there is no way from here to the rendezvous {endpoint} ({error}): check its name") from error


def _number_of(address: str) -> str:
    """Of this machine, by number or name. Raises `UserError` for a name by which others mean another machine."""
    try:
        number = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UserError(
            f"--address {address}: nobody knows it ({error}); `hostname -I` lists those of this machine"
        ) from error
    assert isinstance(number, str)
    if ip_address(number).is_loopback and address not in (number, "localhost"):
        raise UserError(
            f"--address {address}: on this machine that name stands for {number}, which no other one reaches; give the "
            "number, as `hostname -I` lists it"
        )
    return number


if __name__ == "__main__":
    serve_until_ended(int(sys.argv[2]), sys.argv[1])
