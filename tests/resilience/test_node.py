"""A node of a launch: what it says of bad input, and what becomes of ranks that end badly; ranks are scripts here."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from torch.distributed import TCPStore
from typer.testing import CliRunner

from optimus.cli import app
from optimus.errors import UserError
from optimus.resilience import node as module
from optimus.resilience import store as store_module
from optimus.resilience.events import EventLog
from optimus.resilience.exclusion import exclude, excluded
from optimus.resilience.faults import FaultPlan
from optimus.resilience.node import Launch, run_node
from optimus.resilience.policy import Do
from optimus.resilience.store import connect, own_address, parse, serve
from optimus.train.nodes import launch, parse_keep_alive, rehearse

# Does what the lines of its node's file say, one at each start: ends with a code, or waits until it is ended.
RANK = """
import pathlib, sys, time
orders = pathlib.Path(sys.argv[1])
first, *rest = orders.read_text().split()
orders.write_text(" ".join(rest or [first]))
if first.startswith("wait"):
    time.sleep(60)
time.sleep(0.5)
sys.exit(int(first))
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch sets is taken back."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield serve(0)


@pytest.fixture
def one(store: TCPStore, tmp_path: Path) -> Launch:
    """A launch of one node."""
    return Launch(tmp_path / "run", "n0", 1, 0, 1, f"127.0.0.1:{store.port}", interval=1, attempts=4, wait=20.0)


Together = Callable[..., dict[str, Any]]


@pytest.fixture
def together(one: Launch, tmp_path: Path) -> Iterator[Together]:
    """Runs nodes whose ranks do what they are told, and gives how each has ended: its result, or its error."""
    with ThreadPoolExecutor(4) as pool:

        def run(told: dict[str, str], **changes: Any) -> dict[str, Any]:
            futures: dict[str, Future[Any]] = {}
            for node, orders in told.items():
                (tmp_path / node).write_text(orders)
                command = [sys.executable, "-c", RANK, str(tmp_path / node)]
                futures[node] = pool.submit(run_node, replace(one, **changes, node=node), command)
            errors = {node: future.exception(60) for node, future in futures.items()}
            return {node: errors[node] or future.result() for node, future in futures.items()}

        yield run


def told(one: Launch) -> list[tuple[str, str | None, str]]:
    return [(event["kind"], event["node"], event["detail"]) for event in EventLog(one.run).read()]


def test_a_run_of_one_node(one: Launch, together: Together) -> None:
    assert together({"n0": "0"}) == {"n0": None}
    assert told(one) == [("finished", "n0", "")]


def test_crashes_restart_together_and_the_second_is_the_nodes_fault(one: Launch, together: Together) -> None:
    ends = together({"n0": "3 3 3", "n1": "wait wait 0", "n2": "0"}, nodes=2, spares=1)
    # Any of them may be the spare at first; n0 ends as a spare that was never used, or is excluded.
    events = told(one)
    if ("failure", "n0", "rank 0 crashed (exit code 3)") not in events and ("failure", "n0", "rank 1 crashed (exit code 3)") not in events:
        pytest.skip("n0 was the spare")
    assert events[-1][0] == "finished"
    assert ends["n1"] is None
    assert ends["n2"] is None
