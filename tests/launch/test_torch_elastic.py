"""TorchElastic's private parts are as `torch_elastic.py` expects, and its repairs of them work."""

import inspect
import pickle
import signal
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch.distributed import HashStore, Store
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStateError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from helpers.sweep import in_turns
from optimus.launch import torch_elastic
from optimus.launch.store import LOOPBACK
from optimus.launch.torch_elastic import Agent, Rendezvous
from optimus.resilience.exits import Exit
from optimus.resilience.policy import Do

CHANGED = f"torch {torch.__version__} has changed what optimus/launch/torch_elastic.py uses: "
BUSY = 300.0  # seconds that a busy machine may take


@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        (dynamic._BackendRendezvousStateHolder, "backend settings"),
        (dynamic._BackendRendezvousStateHolder._sanitize, "self"),
        (dynamic.DynamicRendezvousHandler, "node settings backend_name store state_holder"),
        (dynamic.DynamicRendezvousHandler.next_rendezvous, "self"),
        (dynamic.DynamicRendezvousHandler._create_tcp_store_server, "self master_addr master_port"),
        (dynamic.DynamicRendezvousHandler.num_nodes_waiting, "self"),
        (dynamic.DynamicRendezvousHandler.shutdown, "self"),
        (dynamic.DynamicRendezvousHandler._stop_heartbeats, "self"),
        (dynamic.DynamicRendezvousHandler._node_desc_generator.generate, "local_addr"),
        (dynamic.RendezvousSettings, "run_id min_nodes max_nodes timeout keep_alive_interval keep_alive_max_attempt"),
        (dynamic.RendezvousTimeout, "join last_call"),
        (dynamic._DistributedRendezvousOpExecutor.run, "self state_handler deadline"),
        (dynamic._RendezvousExitOp.__call__, "self ctx deadline"),
        (C10dRendezvousBackend, "store run_id"),
        (C10dRendezvousBackend._decode_state, "self base64_state"),
        (RendezvousStoreInfo.build, "rank store local_addr"),
        (api.WorkerSpec, "role local_world_size rdzv_handler max_restarts monitor_interval entrypoint args local_addr"),
        (LocalElasticAgent, "spec logs_specs exit_barrier_timeout"),
        (LocalElasticAgent.run, "self role"),
        (LocalElasticAgent._stop_workers, "self worker_group"),
        (LocalElasticAgent._rendezvous, "self worker_group"),
        (LocalElasticAgent._invoke_run, "self role"),
        (LocalElasticAgent._initialize_workers, "self worker_group"),
        (LocalElasticAgent._restart_workers, "self worker_group"),
        (LocalElasticAgent._monitor_workers, "self worker_group"),
        (LocalElasticAgent._exit_barrier, "self"),
        (LocalElasticAgent._shutdown, "self death_sig"),
    ],
    ids=lambda part: part.__qualname__ if callable(part) else None,
)
def test_a_private_part_takes_these_arguments(part: Callable[..., Any], arguments: str) -> None:
    found = inspect.signature(part).parameters
    lacks = [name for name in arguments.split() if name not in found]
    assert not lacks, f"{CHANGED}{part.__qualname__} takes no {', '.join(lacks)}"
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [
        each.name
        for each in found.values()
        if each.default is each.empty and each.kind not in free and each.name not in arguments.split()
    ]
    assert not more, f"{CHANGED}{part.__qualname__} asks for {', '.join(more)}"


def test_what_is_overridden_is_there_to_be_overridden() -> None:
    own = {
        torch_elastic._StateHolder: ("_sanitize",),
        torch_elastic._Backend: ("_decode_state",),
        Rendezvous: ("num_nodes_waiting", "next_rendezvous", "_create_tcp_store_server"),
        Agent: ("_shutdown", "_stop_workers", "_rendezvous", "_invoke_run"),
    }
    for kind, names in own.items():
        for name in names:
            assert name in vars(kind)
            assert hasattr(kind.__base__, name), f"{CHANGED}{kind.__base__.__name__} has no {name} any more"
    handler = inspect.getsource(dynamic.DynamicRendezvousHandler.next_rendezvous)
    for name in ("_shared_tcp_store_server", "_bootstrap_store_info"):
        assert f"self.{name}" in handler, f"{CHANGED}the store of the ranks is no {name} any more"
    state = vars(dynamic._RendezvousState())
    for name in ("round", "participants", "wait_list", "redundancy_list", "closed"):
        assert name in state, f"{CHANGED}_RendezvousState has no {name} any more"


class Nodes:
    """Nodes that meet in one store, each in a thread of this process.

    A node without a heartbeat for `patience` seconds counts as dead. Busy machines may stop all threads for seconds.
    """

    def __init__(self, pool: ThreadPoolExecutor, places: int, count: int, wait: float, patience: int) -> None:
        self.store: Store = HashStore()
        self.dead: list[str] = []
        self.all = [
            Rendezvous.for_launch(
                self.store,
                "test",
                places,
                LOOPBACK,
                keep_alive=(1, patience),
                wait=wait,
                died=self.dead.append,
            )
            for number in range(count)
        ]
        self._pool = pool

    def join(self, *numbers: int) -> list[Future[Any]]:
        """Makes these nodes look for a place in the world; returns their futures."""
        return [self._pool.submit(self.all[number].next_rendezvous) for number in numbers]

    def members(self) -> list[str]:
        """Returns the nodes that have a place, as the first node knows."""
        return [repr(node) for node in self.all[0]._state_holder.state.participants]


@pytest.fixture
def meet() -> Iterator[Callable[..., Nodes]]:
    """A function that makes `Nodes`; all of them are shut down after the test."""
    made: list[Nodes] = []
    with ThreadPoolExecutor(8) as pool:

        def make(places: int, count: int, wait: float = BUSY, patience: int = 60) -> Nodes:
            made.append(Nodes(pool, places, count, wait, patience))
            return made[-1]

        yield make
        for nodes in made:
            for node in nodes.all:
                node.shutdown()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BUSY
    while not condition():
        assert time.monotonic() < deadline, f"{CHANGED}{what}"
        time.sleep(0.1)


@pytest.mark.in_turn(2, 3)
def test_spares_do_not_disturb_a_full_world_but_take_a_free_place(meet: Callable[..., Nodes]) -> None:
    nodes = meet(2, 4)
    first = nodes.join(0, 1)
    assert sorted(each.result(BUSY).rank for each in first) == [0, 1]
    spares = nodes.join(2, 3)

    def left_over() -> int:
        assert nodes.all[0].num_nodes_waiting() == 0, f"{CHANGED}a spare disturbs a full world"
        return nodes.all[0].spares()

    until(lambda: left_over() == 2, "spares are not seen")

    nodes.all[1].leave()
    assert not nodes.all[1].is_closed(), f"{CHANGED}a node that leaves closes the rendezvous"
    until(lambda: nodes.all[0].num_nodes_waiting() > 0, "nobody waits for a free place")
    assert nodes.join(0)[0].result(BUSY).world_size == 2
    until(lambda: any(each.done() for each in spares), "no spare takes the place")
    until(lambda: left_over() == 1, "the other spare is not seen")  # both spares applied for the place
    assert len(nodes.members()) == 2
    assert nodes.all[1].member not in nodes.members()
    assert not nodes.dead

    (late,) = [each for each in spares if not each.done()]
    nodes.all[0].shutdown()
    with pytest.raises(Exception, match=r"closed|^$") as caught:
        late.result(120)
    assert isinstance(caught.value, (RendezvousClosedError, dynamic.RendezvousGracefulExitError)), CHANGED


@pytest.mark.in_turn(0, 3)
def test_a_spare_that_comes_too_late_for_a_free_place_waits_on(meet: Callable[..., Nodes]) -> None:
    """A spare that misses a free place keeps waiting after the world's time limit: the world is complete."""
    nodes = meet(2, 4, wait=45.0)
    for each in nodes.join(0, 1):
        each.result(BUSY)
    spares = nodes.join(2, 3)
    until(lambda: nodes.all[0].num_nodes_waiting() == 0 and nodes.all[0].spares() == 2, "spares are not seen")
    nodes.all[1].leave()
    until(lambda: nodes.all[0].num_nodes_waiting() == 2, "not both go for the free place")
    nodes.join(0)[0].result(BUSY)
    until(lambda: any(each.done() for each in spares), "no spare takes the place")
    (late,) = [each for each in spares if not each.done()]
    time.sleep(50)
    assert not late.done(), f"{CHANGED}the time of a spare runs out in a full world"
    nodes.all[0].leave()
    (stays,) = [number for number in (2, 3) if spares[number - 2] is not late]
    nodes.join(stays)[0].result(BUSY)
    assert late.result(120).world_size == 2


@pytest.mark.in_turn(2, 3)
def test_who_waits_for_a_new_world_is_no_spare(meet: Callable[..., Nodes]) -> None:
    nodes = meet(3, 3)
    for each in nodes.join(0, 1, 2):
        each.result(BUSY)
    again = nodes.join(1, 2)  # node 0 has not noticed yet that the others left
    until(lambda: nodes.all[0].num_nodes_waiting() == 2, "nobody waits")
    assert nodes.all[0].spares() == 0
    nodes.join(0)[0].result(BUSY)
    assert sorted(each.result(BUSY).rank for each in again) != [0, 0]


@pytest.mark.in_turn(1, 3)
def test_of_a_silent_node_all_are_told_once_and_its_place_is_free(meet: Callable[..., Nodes]) -> None:
    nodes = meet(2, 3, patience=8)
    for each in nodes.join(0, 1):
        each.result(BUSY)
    (spare,) = nodes.join(2)
    until(lambda: nodes.all[0].num_nodes_waiting() == 0 and nodes.all[0].spares() == 1, "the spare is not seen")
    nodes.all[1]._stop_heartbeats()
    until(lambda: nodes.all[0].num_nodes_waiting() > 0, "a silent node keeps its place")
    assert set(nodes.dead) == {nodes.all[1].member}
    nodes.join(0)[0].result(BUSY)
    spare.result(BUSY)
    assert nodes.all[1].member not in nodes.members()


def test_clocks_that_are_wrong_or_stop_with_the_machine_kill_no_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only heartbeats that do not change while a node watches tell that their node is dead."""
    now, dead = 0.0, list[str]()
    monkeypatch.setattr(torch_elastic.time, "monotonic", lambda: now)
    node = Rendezvous.for_launch(HashStore(), "test", 2, LOOPBACK, keep_alive=(1, 3), wait=5.0, died=dead.append)
    holder, other = node._state_holder, dynamic._NodeDesc("other", 1, 0)

    def look(after: float, beat: datetime) -> set[Any]:
        nonlocal now
        now += after
        holder._state.participants.update({other: 0})
        holder._state.last_heartbeats[other] = beat
        holder._sanitize()
        return set(holder._state.participants)

    start = datetime.now(timezone.utc)
    for number in range(8):  # the other node's clock is hours behind, then ahead, then set back
        off = timedelta(hours=(-5, 5, 0)[number // 3])
        assert look(1.0, start + off + timedelta(seconds=number)) == {other}
    assert all(beat <= datetime.now(timezone.utc) for beat in holder._state.last_heartbeats.values())
    assert look(1000.0, start) == {other}  # the whole machine was stopped: nobody looked and nobody beat
    assert look(1.0, start) == {other}
    assert look(1.0, start) == {other}
    assert not dead
    assert look(1.0, start) == {other}
    assert look(1.0, start) == set()
    assert dead == [repr(other)]


@pytest.mark.parametrize(
    "leaving", in_turns([0, 1], 2, always=1), ids=["the first node leaves", "the first node stays"]
)
def test_the_first_node_of_every_world_tells_where_its_ranks_meet(meet: Callable[..., Nodes], leaving: int) -> None:
    """The first node of every world hosts a new store for its ranks; the store listens on the loopback address only."""
    nodes = meet(2, 3)
    before = {each.result(BUSY).rank: each.result(BUSY) for each in nodes.join(0, 1)}
    ranks = {number: nodes.all[number]._get_world()[0] for number in (0, 1)}
    (gone,) = [number for number, rank in ranks.items() if rank == leaving]
    nodes.all[gone].leave()
    worlds = [each.result(BUSY) for each in nodes.join(1 - gone, 2)]
    (first,) = [number for world, number in zip(worlds, (1 - gone, 2)) if world.rank == 0]
    server = nodes.all[first]._shared_tcp_store_server
    assert server is not None
    places = {(told.master_addr, told.master_port) for told in (world.bootstrap_store_info for world in worlds)}
    assert places == {(LOOPBACK, server.port)}, f"{CHANGED}nodes keep the store of an earlier world"
    assert places != {(LOOPBACK, before[0].bootstrap_store_info.master_port)}
    assert all(world.bootstrap_store_info for world in worlds)
    assert all(node.use_agent_store for node in nodes.all)
    ports = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert {each.ip for each in ports if each.port == server.port} == {LOOPBACK}


class Payload:
    """Runs code when unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


@pytest.mark.parametrize("form", ["payload", "payload within", "another thing", "no pickle"])
def test_what_the_store_holds_runs_nothing(tmp_path: Path, form: str) -> None:
    """Values in the store never run code, though anyone with access to the store can write there."""
    state = dynamic._RendezvousState()
    state.participants[Payload(tmp_path / "mark")] = 0
    content = {
        "payload": pickle.dumps(Payload(tmp_path / "mark")),
        "payload within": pickle.dumps(state),
        "another thing": pickle.dumps({"round": 1}),
        "no pickle": b"no pickle",
    }
    store = HashStore()
    node = Rendezvous.for_launch(store, "test", 1, LOOPBACK, keep_alive=(1, 60), wait=5.0, died=lambda _: None)
    store.set("torch.rendezvous.test", b64encode(content[form]))
    with pytest.raises(RendezvousStateError, match="the store has no state of a rendezvous"):
        node.next_rendezvous()
    assert not (tmp_path / "mark").exists()
    if form.startswith("payload"):
        pickle.loads(content[form])
        assert (tmp_path / "mark").exists()  # unpickling would have run the code


RANK = """
import pathlib, sys, time
orders = pathlib.Path(sys.argv[1])
while not orders.exists():
    time.sleep(0.05)
sys.exit(int(orders.read_text()))
"""


DECISIONS = {7: Do.RESTART, 8: Do.LEAVE, 9: Do.STOP}


class World(NamedTuple):
    round: int
    rank: int
    size: int


class Agents:
    """Nodes with agents. Each agent's only rank exits with the code in the node's file, once the file exists."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.worlds: list[tuple[int, World]] = []
        self.ends: dict[int, Do | Exit | None] = {}
        self._folder = folder
        for number, node in enumerate(nodes.all):
            threading.Thread(target=self._run, args=(number, node), daemon=True).start()

    def _run(self, number: int, node: Rendezvous) -> None:
        orders = self._folder / str(number)

        def failed(failures: dict[int, ProcessFailure]) -> Do:
            orders.unlink()  # fails only once
            (failure,) = failures.values()
            return DECISIONS[failure.exitcode]

        command = [sys.executable, "-c", RANK, str(orders)]
        (self._folder / "logs").mkdir(exist_ok=True)
        agent = Agent(
            node,
            command,
            1,
            joined=lambda *world: self.worlds.append((number, World(*world[:3]))),
            failed=failed,
            logs=self._folder / "logs",
        )
        self.ends[number] = agent.until_the_end()

    def tell(self, code: int, *numbers: int) -> None:
        """Makes the ranks of these nodes exit with this code."""
        for number in numbers:
            partial = self._folder / f"{number}.partial"
            partial.write_text(str(code))
            partial.rename(self._folder / str(number))

    def world(self, number: int) -> list[int]:
        """Waits for the world of this number, of two nodes, and returns its nodes."""
        until(lambda: len(self.worlds) >= 2 * number, f"agents do not come together for world {number}")
        found = self.worlds[2 * number - 2 : 2 * number]
        assert len({world.round for _, world in found}) == 1
        assert sorted(world.rank for _, world in found) == [0, 1]
        assert {world.size for _, world in found} == {2}
        return [node for node, _ in found]


@pytest.mark.in_turn(1, 3)
def test_agents_to_the_end(meet: Callable[..., Nodes], tmp_path: Path) -> None:
    """Agents restart together after a crash, a spare replaces an agent that leaves, and spares end with the job."""
    agents = Agents(meet(2, 4), tmp_path)
    agents.tell(7, agents.world(1)[0])
    bad = agents.world(2)[0]
    assert agents.ends == {}
    agents.tell(8, bad)
    good = agents.world(3)
    assert bad not in good
    until(lambda: bad in agents.ends, "an agent that leaves does not end")
    assert agents.ends == {bad: Do.LEAVE}
    agents.tell(0, *good)
    until(lambda: len(agents.ends) == 4, "the end of a job does not let spares go")
    assert agents.ends == {bad: Do.LEAVE} | {number: None for number in range(4) if number != bad}
    assert len(agents.worlds) == 6


def test_an_agent_that_stops_stops_all(meet: Callable[..., Nodes], tmp_path: Path) -> None:
    agents = Agents(meet(2, 2), tmp_path)
    agents.world(1)
    agents.tell(9, 0)
    until(lambda: 0 in agents.ends, "an agent that stops does not end")
    agents.tell(7, 1)  # its rank fails because the other rank is lost
    until(lambda: 1 in agents.ends, "an agent restarts into a rendezvous that is closed")
    assert agents.ends == {0: Do.STOP, 1: None}


@pytest.mark.in_turn(0, 3)
@pytest.mark.parametrize("by", [SignalException("told to end", signal.SIGTERM), RuntimeError("an accident")])
def test_however_an_agent_ends_its_heartbeats_do(
    meet: Callable[..., Nodes], tmp_path: Path, by: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's heartbeat thread ends with the agent in any case; a thread that calls the store during Python's exit
    aborts the process."""
    nodes = meet(1, 1)

    name = f"RendezvousKeepAliveTimer_{nodes.all[0]._this_node.local_id}"

    def lives() -> bool:
        return name in [thread.name for thread in threading.enumerate()]

    def joined(*world: Any) -> None:
        assert lives()
        raise by

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the agent ignores further signals for good
    agent = Agent(nodes.all[0], [sys.executable, "-c", ""], 1, joined=joined, failed=lambda _: Do.STOP, logs=tmp_path)
    with nullcontext() if isinstance(by, SignalException) else pytest.raises(RuntimeError, match="an accident"):
        assert agent.until_the_end() == 143
    assert not lives()
