"""The store where nodes meet: a server of its own, so that no node of the run is a single point of failure."""

import json
import signal
import socket
import sys
import time
from datetime import timedelta

from torch.distributed import TCPStore

from optimus.errors import UserError


def parse(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises `UserError`."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {endpoint}: give HOST:PORT, where `optimus rendezvous --port PORT` runs")
    return host, int(port)


def serve(port: int) -> TCPStore:
    """A store that others reach on this port, for as long as it is held. Raises `UserError` when it is taken."""
    if not 0 <= port < 65536:
        raise UserError(f"--port {port}: give a number from 1 to 65535")
    try:
        return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"port {port} is not free here ({str(error).splitlines()[0]}): choose another --port"
        ) from error


def serve_until_ended(port: int, as_json: bool = False) -> None:
    """`serve` until Ctrl-C or a termination signal, and say where, for people or as JSON. Raises as it does."""
    store = serve(port)
    said = json.dumps({"port": store.port}) if as_json else f"nodes meet here on port {store.port}; Ctrl-C ends it"
    print(said, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


def connect(endpoint: str, wait: float) -> TCPStore:
    """The store at HOST:PORT. Raises `UserError` when nobody answers within `wait` seconds."""
    host, port = parse(endpoint)
    deadline = time.monotonic() + wait
    while True:
        try:  # the store's own attempts are counted in minutes, and their message is a page
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"nobody answers at the rendezvous {endpoint} ({error}): start `optimus rendezvous --port {port}` "
                    f"on {host}"
                ) from error
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


if __name__ == "__main__":
    serve_until_ended(int(sys.argv[1]))
