"""The report over HTTP: local addresses only, fresh data on each request, and ports in use."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from optimus.errors import UserError
from optimus.report.serve import parse_address, report_server


def test_a_run_that_is_being_written(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = make_run(tmp_path / "run")
    with report_server([run], *parse_address("0")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        url = f"http://127.0.0.1:{port}"

        def step() -> int:
            with urllib.request.urlopen(f"{url}/data.json") as answer:
                return int(json.load(answer)["runs"][0]["facts"]["step"])

        assert b"<!doctype html>" in urllib.request.urlopen(f"{url}/").read()
        assert step() == 40
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 41, "loss": 1.0}\n{"step": 42, "lo')
        assert step() == 41
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/etc/passwd")
        other = urllib.request.Request(url, headers={"Host": f"elsewhere.example:{port}"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(other)
        with pytest.raises(UserError) as error:
            report_server([run], "127.0.0.1", int(port))
        assert str(error.value) == (
            f"--serve: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another port, or end the "
            "program that listens there"
        )
        server.shutdown()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_hosts_of_a_local_address(address: str, tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """Port 80 is not in the header. Any local address refuses names of other machines."""
    with report_server([make_run(tmp_path / "run")], address, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def status(host: str, path: str = "/data.json") -> int:
            asked = urllib.request.Request(f"http://{address}:{server.server_address[1]}{path}", headers={"Host": host})
            try:
                with urllib.request.urlopen(asked) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        for host in (address, f"{address}:80", "localhost", "127.0.0.1:8080", "[::1]:80"):
            assert status(host) == 200
        for host in ("elsewhere.example", "elsewhere.example:80", "127.0.0.1.elsewhere.example", "[x", "10.0.0.1"):
            assert status(host) == 403
        assert status("localhost", "/?x=1") == status("localhost", "/data.json?x=1") == 200
        server.shutdown()


@pytest.mark.parametrize(("text", "found"), [("80", ("127.0.0.1", 80)), ("0.0.0.0:80", ("0.0.0.0", 80))])
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize("text", ["", "x", "host:", "1:99999"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(UserError, match="give a port"):
        parse_address(text)
