"""A waiting node says what it waits for, at times of a clock that the test sets."""

import socket
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from optimus.errors import UserError
from optimus.launch import node as module
from optimus.launch.node import Launch, run_node
from optimus.launch.store import LOOPBACK
from optimus.launch.torch_elastic import Rendezvous
from optimus.launch.waiting import Waiting


class Clock:
    """Records the messages of a `Waiting`, each with the second of its appearance."""

    def __init__(self) -> None:
        self.now, self.said = 100.0, []  # type: float, list[tuple[float, str]]
        self.waiting = Waiting(lambda text: self.said.append((self.now - 100, text)), clock=lambda: self.now)

    def pass_by(self, seconds: float, what: str) -> None:
        for _ in range(round(2 * seconds)):
            self.waiting.on(what)
            self.now += 0.5


def test_what_is_waited_for_is_said_at_once_and_every_ten_seconds() -> None:
    clock = Clock()
    clock.pass_by(25, "a store")
    assert clock.said == [
        (0, "waits for a store"),
        (10, "has waited 10 s for a store"),
        (20, "has waited 20 s for a store"),
    ]
    clock.pass_by(11, "nodes")
    assert clock.said[3:] == [(25, "waits for nodes"), (35, "has waited 35 s for nodes")]
    clock.waiting.over()
    clock.now += 1000
    clock.pass_by(11, "nodes")
    assert clock.said[5:] == [(1036, "waits for nodes"), (1046, "has waited 10 s for nodes")]


def test_a_spare_does_not_fill_the_log_for_days() -> None:
    clock = Clock()
    clock.pass_by(600, "a place")
    assert len(clock.said) == 60
    clock.now += 24 * 3600
    clock.said.clear()
    clock.pass_by(3600, "a place")
    assert 2 <= len(clock.said) <= 4


def test_what_a_node_waits_for_in_a_rendezvous() -> None:
    said: list[str] = []
    node = Rendezvous.for_launch(
        HashStore(), "test", 2, LOOPBACK, keep_alive=(1, 60), wait=5.0, died=lambda _: None, waiting=said.append
    )
    state = _RendezvousState()
    first, second = _NodeDesc("a", 1, 0), _NodeDesc("b", 1, 0)

    def told() -> list[str]:
        said.clear()
        node._tell(state)
        return said

    state.participants = {first: 0}
    assert told() == ["nodes: 1 of 2 have joined"]
    state.participants, state.complete = {first: 0, second: 1}, True
    assert told() == ["a free position, as a spare: all 2 are taken"]
    state.participants = {first: 0}
    assert told() == ["1 of 2 nodes to stop their ranks, so that all nodes restart together"]
    state.participants = {first: 0, node._this_node: 1}
    assert told() == []
    state.closed, state.participants = True, {}
    assert told() == []


def test_a_launch_without_a_store_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch without a store repeats what it waits for; here, at every opportunity."""
    monkeypatch.setattr(module, "Waiting", lambda say: Waiting(say, every=0.0))
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))  # does not listen
        endpoint = f"{LOOPBACK}:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match="no rendezvous answers"):
            run_node(Launch("", run=tmp_path / "run", node="n0", endpoint=endpoint, wait=1.2), ["true"])
    first, *others = capsys.readouterr().err.splitlines()
    assert first == f"node n0: waits for the rendezvous {endpoint}, which does not answer, for at most 1.2 s"
    assert others
    for line in others:
        assert line.startswith("node n0: has waited ")
        assert line.endswith(f" s for the rendezvous {endpoint}, which does not answer, for at most 1.2 s")
