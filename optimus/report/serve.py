"""Serves reports over HTTP while the runs continue."""

import json
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from optimus.errors import UserError
from optimus.report.page import render, report_data

REFRESH = 10.0  # seconds between the page's requests for new data
_LOCAL = "127.0.0.1"


def parse_address(text: str) -> tuple[str, int]:
    """Parses `ADDRESS:PORT`, or `PORT` for 127.0.0.1. Raises `UserError` without a port from 0 to 65535."""
    address, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--serve {text}: give a port, such as 8080, or an address and a port, such as 0.0.0.0:8080")
    return address or _LOCAL, int(port)


def report_server(runs: Sequence[str | Path], address: str, port: int) -> ThreadingHTTPServer:
    """Returns a listening server of the report of `runs`. Port 0 stands for any free port."""
    report_data(runs)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                host, path = _host_of(self.headers.get("Host", "")), self.path.partition("?")[0]
                bound = str(self.server.server_address[0])  # type: ignore[index]
                # Prevents DNS rebinding: another site could resolve a name of its domain to this machine.
                if _is_local(bound) and host != address and not _is_local(host):
                    self.send_error(HTTPStatus.FORBIDDEN)
                elif path == "/":
                    self._answer("text/html", render(report_data(runs), refresh=REFRESH))
                elif path == "/data.json":
                    data = {**report_data(runs), "refresh": REFRESH}
                    self._answer("application/json", json.dumps(data, allow_nan=False))
                else:
                    self.send_error(HTTPStatus.NOT_FOUND)
            except UserError as error:
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))
            except (BrokenPipeError, ConnectionResetError):  # the browser has closed the connection
                self.close_connection = True

        def _answer(self, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: a line for every request would hide other messages."""

    try:
        return ThreadingHTTPServer((address, port), Handler)
    except (OSError, OverflowError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"--serve: cannot listen on {address} port {port}: {cause}; choose another port, or end the program that "
            "listens there"
        ) from error


def _host_of(header: str) -> str:
    """Returns the name or address in a `Host` header, without the port; empty for an invalid header."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_local(host: str) -> bool:
    """Returns True for `localhost` and for addresses of the loopback interface."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
