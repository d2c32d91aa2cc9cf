"""A webhook or command receives notifications; its failure gives a message and does not end the run."""

import json
import shlex
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from optimus.observe.notify import notify

MESSAGE = {"run": "runs/a", "event": "finished", "loss": 2.5}


def test_a_command(tmp_path: Path) -> None:
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
    words = [sys.executable, "-c", program, str(tmp_path / "told")]
    assert notify(shlex.join(words), MESSAGE) is None
    assert json.loads((tmp_path / "told").read_text()) == MESSAGE
    assert notify(shlex.join(words), MESSAGE | {"loss": float("nan"), "bits_per_byte": float("inf")}) is None
    assert json.loads((tmp_path / "told").read_text()) == MESSAGE | {"loss": None, "bits_per_byte": None}


def test_a_webhook() -> None:
    told: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204 if self.path == "/hook" else 500)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert notify(f"{url}/hook", MESSAGE) is None
        assert told == [MESSAGE]
        assert "500" in str(notify(f"{url}/wrong", MESSAGE))
        server.shutdown()


def test_an_answer_that_is_not_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"hello\n")

        threading.Thread(target=answer, daemon=True).start()
        assert "hello" in str(notify(f"http://127.0.0.1:{server.getsockname()[1]}/", MESSAGE))


def test_what_goes_wrong() -> None:
    assert "exit code 3" in str(notify(shlex.join([sys.executable, "-c", "raise SystemExit(3)"]), MESSAGE))
    assert "observe.notify" in str(notify("/no/such/program", MESSAGE))
    assert "observe.notify" in str(notify("'unclosed", MESSAGE))
    assert "observe.notify" in str(notify("http://127.0.0.1:9/", MESSAGE))
