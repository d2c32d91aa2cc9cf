"""Serves TCP stores, and connects to the store of a rendezvous.

Anyone who reaches a store can change the contents (docs/security.md), so each store listens on one address.
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

from torch.distributed import DistError, TCPStore

from optimus.errors import UserError, first_line
from optimus.launch.launchers import LOOPBACK


def parse(endpoint: str) -> tuple[str, int]:
    """Parses HOST:PORT into host and port. Raises `UserError` for other text, and for port 0 or a port above 65535."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {endpoint}: give the HOST:PORT at which `optimus rendezvous --port PORT` runs")
    return host, int(port)


def serve(port: int, address: str = LOOPBACK) -> TCPStore:
    """Starts a store on `port` of this machine's `address`; with `port` 0, on any free port.

    The store serves as long as the returned object lives. Raises `UserError` when the store cannot listen, or when
    `address` is a name (except localhost) that stands for a loopback address.
    """
    if not 0 <= port < 65536:
        raise UserError(f"--port {port}: give a number from 1 to 65535")
    number = _number_of(address)
    try:
        listening = socket.create_server((number, port), backlog=1024)
    except PermissionError as error:
        raise UserError(f"this user may not use port {port} ({error}): choose a --port of 1024 or more") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use on this machine ({error}): choose another --port") from error
        if error.errno != errno.EADDRNOTAVAIL:
            raise UserError(f"cannot listen on port {port} of {address} ({error})") from error
        raise UserError(
            f"--address {address}: this machine has no such address ({error}); `hostname -I` lists its addresses"
        ) from error
    port = listening.getsockname()[1]
    # Without `master_listen_fd`, TCPStore listens on all interfaces.
    return TCPStore(number, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def serve_until_ended(port: int, address: str = LOOPBACK, as_json: bool = False) -> None:
    """Prints the address of a store as text or JSON, and serves the store until SIGINT or SIGTERM."""
    store = serve(port, address)
    alone = (
        " of this machine only (for other machines give --address)"
        if ip_address(_number_of(address)).is_loopback
        else ""
    )
    text = f"the rendezvous waits for nodes{alone} on {address}:{store.port}; Ctrl-C ends it"
    print(json.dumps({"address": address, "port": store.port}) if as_json else text, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


def connect(endpoint: str, wait: float, waiting: Callable[[str], None] = lambda _: None) -> TCPStore:
    """Connects to the store at HOST:PORT, and calls `waiting` with a message before each further attempt.

    Raises `UserError` when `endpoint` is not HOST:PORT, accepts no connection within `wait` seconds, or belongs to a
    server that is not a store.
    """
    host, port = parse(endpoint)
    cure = f"start `optimus rendezvous --port {port} --address {host}` on {host}"
    deadline = time.monotonic() + wait
    while True:
        try:  # TCPStore itself would retry for minutes, and its error message would fill a page
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"no rendezvous answers at {endpoint} ({error}): {cure}") from error
            waiting(f"the rendezvous {endpoint}, which does not answer, for at most {wait:g} s")
            time.sleep(0.5)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(60.0, wait)))
    except DistError as error:
        raise UserError(f"another server answers at {endpoint} ({first_line(error)}): {cure}") from error


def own_address(endpoint: str) -> str:
    """Returns the address from which this machine reaches the store.

    Raises `UserError` when `endpoint` is not HOST:PORT, the host is unknown, or this machine has no route to the host.
    """
    host, port = parse(endpoint)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"this machine has no route to the rendezvous {endpoint} ({error}): check its name") from error


def _number_of(address: str) -> str:
    """Resolves `address`, a name or an IPv4 address, to an IPv4 address."""
    try:
        number = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UserError(
            f"--address {address}: the name is unknown ({error}); `hostname -I` lists the addresses of this machine"
        ) from error
    assert isinstance(number, str)
    if ip_address(number).is_loopback and address not in (number, "localhost"):
        raise UserError(
            f"--address {address}: on this machine the name stands for {number}, which no other machine reaches; give an "
            "address that `hostname -I` lists"
        )
    return number


if __name__ == "__main__":
    serve_until_ended(int(sys.argv[2]), sys.argv[1])
