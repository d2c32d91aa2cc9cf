"""A node of a launch: messages for bad input, and the handling of failed ranks. Ranks are scripts here."""

import json
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from typer.testing import CliRunner

from helpers.sweep import in_turns
from optimus import cli
from optimus.checkpoint.lease import LEASE, Lease, LeaseError, living_holder
from optimus.errors import UserError
from optimus.launch import node as module
from optimus.launch.local import register
from optimus.launch.node import Launch, run_node
from optimus.launch.nodes import NodeJob, check_launch, launch, parse_keep_alive, write_batch_script
from optimus.launch.store import connect, own_address, parse, serve
from optimus.launch.waiting import Waiting
from optimus.mesh import Mesh
from optimus.mesh.placement import describe
from optimus.resilience.events import EventLog
from optimus.resilience.exclusion import exclude, excluded
from optimus.resilience.exits import CrashKind, Exit, crash_kinds
from optimus.resilience.policy import Do

# Follows the words of its node's file, one per start and the last one ever after: exits with a code, is killed by a
# signal, or waits until killed. After `hold`, waits for a file before the next word.
RANK = """
import os, pathlib, signal, sys, time
orders = pathlib.Path(sys.argv[1])
first, *rest = orders.read_text().split()
if first == "hold":
    while not orders.with_name("go").exists():
        time.sleep(0.05)
    first, *rest = rest
orders.write_text(" ".join(rest or [first]))
if first == "wait":
    time.sleep(60)
time.sleep(0.3)
if first.startswith("SIG"):
    os.kill(os.getpid(), signal.Signals[first])
sys.exit(int(first))
"""


SERVE = """
import sys
import threading
from optimus.launch.store import serve
store = serve(0)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets variables that a launch changes, so that their former values are restored after the test."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")


@pytest.fixture
def store() -> TCPStore:
    return serve(0)


@pytest.fixture
def one(store: TCPStore, tmp_path: Path) -> Launch:
    """A launch of one node."""
    there = f"127.0.0.1:{store.port}"
    return Launch("", run=tmp_path / "run", node="n0", endpoint=there, keep_alive=(1, 4), wait=20.0)


class Cluster:
    """Nodes whose ranks follow written orders."""

    def __init__(self, pool: ThreadPoolExecutor, store: TCPStore, one: Launch, folder: Path) -> None:
        self._pool, self._store, self._one, self._folder = pool, store, one, folder
        self._futures: dict[str, Future[Do | Exit | None]] = {}
        self.announced: list[tuple[str, str]] = []

    def use(self, kinds: Mapping[int, CrashKind]) -> None:
        """Replaces the table of crashes of all nodes."""
        self._one = replace(self._one, kinds=kinds)

    def announce(self, event: str, detail: str) -> None:
        self.announced.append((event, detail))

    def start(self, *, nodes: int, wait: float = 20.0, max_restarts: int = 5, spares: int = 0, **orders: str) -> None:
        """Starts nodes by name."""
        for node, told in orders.items():
            (self._folder / node).write_text(told)
            launch = replace(self._one, node=node, nodes=nodes, spares=spares, wait=wait, max_restarts=max_restarts)
            command = [sys.executable, "-c", RANK, str(self._folder / node)]
            self._futures[node] = self._pool.submit(run_node, launch, command, self.announce)

    def wait_for_world(self) -> None:
        """Waits until the nodes have formed a world for the first time."""
        deadline = time.monotonic() + 300
        while not self._store.check(["optimus/world"]):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def wait_for_spare(self) -> None:
        """Waits until one spare waits and the other nodes know of the spare."""
        deadline = time.monotonic() + 300
        while not pickle.loads(b64decode(self._store.get("torch.rendezvous.optimus"))).redundancy_list:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.5)

    def end(self) -> dict[str, Any]:
        """Returns the result, or the exception, of each node."""
        errors = {node: future.exception(60) for node, future in self._futures.items()}
        return {node: errors[node] or future.result() for node, future in self._futures.items()}

    def events(self) -> list[tuple[str, str | None, str]]:
        return [(event["kind"], event["node"], event["detail"]) for event in EventLog(self._one.run).read()]


@pytest.fixture
def cluster(one: Launch, store: TCPStore, tmp_path: Path) -> Iterator[Cluster]:
    with ThreadPoolExecutor(4) as pool:
        yield Cluster(pool, store, one, tmp_path)


def test_a_run_of_one_node(cluster: Cluster) -> None:
    cluster.start(nodes=1, n0="0")
    assert cluster.end() == {"n0": None}
    assert cluster.events() == []  # ranks themselves record that a run has finished


def test_a_launch_that_has_ended_is_no_run_that_is_done(
    cluster: Cluster, one: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store of an earlier launch is refused. Only a node that comes too late to a finished run ends without an error."""
    cluster.start(nodes=1, n0="0")
    assert cluster.end() == {"n0": None}
    cluster.start(nodes=1, n1="0")
    cure = "to train again, give another --name or restart `optimus rendezvous`"
    assert str(cluster.end()["n1"]) == f"the launch optimus at {one.endpoint} has ended already: {cure}"
    EventLog(one.run).write("finished")
    cluster.start(nodes=1, n2="0")
    assert cluster.end()["n2"] is None
    assert f"has ended already, because the run has finished; {cure}" in capsys.readouterr().err


def test_a_run_that_was_told_to_end_ends_on_all_nodes(cluster: Cluster) -> None:
    """A run that was told to end has saved, and its exit code says so: nothing is restarted, and no node is at fault."""
    cluster.start(nodes=2, n0="143", n1="143")
    assert cluster.end() == {"n0": Exit.TERMINATED, "n1": Exit.TERMINATED}
    assert cluster.events() == []


def test_the_nodes_of_a_launch_hold_the_folder_together(cluster: Cluster, store: TCPStore, one: Launch) -> None:
    """The nodes of a launch hold the run folder until the last has ended, through restarts; any other run is refused."""
    cluster.start(nodes=2, n0="3 hold 0", n1="wait 0")
    cluster.wait_for_world()
    holder = living_holder(one.run)
    assert holder is not None
    assert holder.token == store.get("optimus/holder").decode()
    with pytest.raises(LeaseError, match=f"{one.run} is held by process .* wait until that run ends"):
        run_node(replace(one, node="n2", name="another"), ["true"])
    with pytest.raises(LeaseError):
        Lease(one.run, "a run").wait()
    (one.run.parent / "go").touch()
    assert cluster.end() == {"n0": None, "n1": None}
    assert not (one.run / LEASE).exists()


def test_a_crash_is_restarted_from_on_all_nodes(cluster: Cluster) -> None:
    cluster.start(nodes=2, n0="3 0", n1="wait 0")
    assert cluster.end() == {"n0": None, "n1": None}
    failure, restart = cluster.events()
    assert failure[:2] == ("failure", "n0")
    assert re.fullmatch(r"rank [01] crashed \(exit code 3\)", failure[2])
    assert restart[0] == "restart"
    assert sorted(re.findall("n[01]", restart[2])) == ["n0", "n1"]
    assert cluster.announced == [("restarted", f"{restart[2]}; {failure[2]}")]


def test_who_was_slow_before_it_came_is_not_to_blame_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = module._Member._joined

    def slow_before(self: module._Member, number: int, *place: Any) -> None:
        if self._told("world") is None:
            self._died(self._rendezvous.member)
        joined(self, number, *place)

    monkeypatch.setattr(module._Member, "_joined", slow_before)
    cluster.start(nodes=1, n0="3 0")
    assert cluster.end() == {"n0": None}
    assert [kind for kind, _, _ in cluster.events()] == ["failure", "restart"]
    assert "crashed" in cluster.events()[0][2]


def test_what_ranks_that_hung_have_said_is_removed(cluster: Cluster, one: Launch) -> None:
    (one.run / ".hang" / "an earlier one").mkdir(parents=True)
    (one.run / ".hang" / "an earlier one" / "0.json").write_text("{}")
    cluster.start(nodes=1, n0="0")
    assert cluster.end() == {"n0": None}
    assert not (one.run / ".hang").exists()


@pytest.mark.in_turn(1, 2)
def test_the_second_crash_is_the_nodes_fault(
    cluster: Cluster, store: TCPStore, one: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add("optimus/crashes/software/n0", 1)
    cluster.start(nodes=2, spares=1, n0="hold 3", n1="wait 0")
    cluster.wait_for_world()
    cluster.start(nodes=2, spares=1, n2="0")
    cluster.wait_for_spare()
    (tmp_path / "go").touch()
    assert cluster.end() == {"n0": Do.LEAVE, "n1": None, "n2": None}
    events = cluster.events()
    assert [event[:2] for event in events[:2]] == [("failure", "n0"), ("exclusion", "n0")]
    assert events[2][0] == "restart"
    assert sorted(re.findall(r"n\d", events[2][2])) == ["n1", "n2"]
    assert len(events) == 3
    assert excluded(one.run) == ["n0"]
    said = capsys.readouterr().err.splitlines()
    assert "node n2: waits for a free position, as a spare: all 2 are taken" in said
    assert re.search(r"node n0: rank [01] crashed \(exit code 3\): leaves, and a spare replaces it", "\n".join(said))
    assert re.search(r"node n2: joins as node [01] of 2: starts rank [01] of 2", "\n".join(said))
    assert "node n1: stops its ranks: another node is lost or has stopped its ranks" in said


@pytest.mark.parametrize("word", in_turns(["SIGSEGV", "71", "SIGKILL", "42"], 2, always=1))
def test_the_first_crash_of_hardware_is_the_nodes_fault(
    cluster: Cluster, store: TCPStore, one: Launch, tmp_path: Path, word: str
) -> None:
    """A spare replaces a node at the first crash that names its hardware, by the built-in table or the user's."""
    cluster.use(crash_kinds({"SIGKILL": "hardware", "42": "hardware"}))
    cluster.start(nodes=2, spares=1, n0=f"hold {word}", n1="wait 0")
    cluster.wait_for_world()
    cluster.start(nodes=2, spares=1, n2="0")
    cluster.wait_for_spare()
    (tmp_path / "go").touch()
    assert cluster.end() == {"n0": Do.LEAVE, "n1": None, "n2": None}
    failure, exclusion, restart = cluster.events()
    ended = f"killed by {word}" if word.startswith("SIG") else f"exit code {word}"
    assert re.fullmatch(rf"rank [01] crashed \({ended}, which names hardware\)", failure[2])
    assert [failure[:2], exclusion[:2], restart[0]] == [("failure", "n0"), ("exclusion", "n0"), "restart"]
    assert excluded(one.run) == ["n0"]
    assert store.add("optimus/crashes/hardware/n0", 0) == 1
    assert store.add("optimus/crashes/software/n0", 0) == 0


@pytest.mark.in_turn(2, 3)
def test_nobody_is_excluded_where_no_spare_is_left(cluster: Cluster, store: TCPStore, one: Launch) -> None:
    """A node that waits for the next world is no spare, so the faulty node is not excluded."""
    store.add("optimus/crashes/software/n0", 5)
    cluster.start(nodes=2, n0="3 0", n1="75 0")
    assert cluster.end() == {"n0": None, "n1": None}
    assert {event[0] for event in cluster.events()} == {"failure", "restart"}
    assert excluded(one.run) == []


@pytest.mark.parametrize("spares", in_turns([1, 2], 2, always=1))
def test_nodes_that_leave_at_one_moment_count_a_spare_once(
    one: Launch, store: TCPStore, tmp_path: Path, spares: int
) -> None:
    """Two faulty nodes decide before either sees the other leave; each spare is counted for one of them only."""
    launch = replace(one, nodes=2, spares=spares, keep_alive=(60, 4))  # nodes hear nothing of each other meanwhile
    names = ["n0", "n1", *(f"spare{number}" for number in range(spares))]
    members = [
        module._Member(
            replace(launch, node=name), connect(one.endpoint, 5.0), lambda _: None, Waiting(lambda _: None), print
        )
        for name in names
    ]
    (bad, worse), waiting = members[:2], members[2:]
    one.run.mkdir()
    with ThreadPoolExecutor(4) as pool:
        worlds = list(pool.map(lambda member: member._rendezvous.next_rendezvous(), (bad, worse)))
        ends = [pool.submit(member._rendezvous.next_rendezvous) for member in waiting]
        for member, info in sorted(zip((bad, worse), worlds), key=lambda each: -each[1].rank):
            member._joined(0, info.rank, 2, info.store)
        for member in (bad, worse):
            while len(member._rendezvous.present()) < len(members):
                member._rendezvous.num_nodes_waiting()
                time.sleep(0.1)
        failures = {0: SimpleNamespace(exitcode=76, message="")}
        done = [member._failed(failures) for member in (bad, worse)]  # type: ignore[arg-type]
        bad._rendezvous.shutdown()
        assert all(end.exception(30) is not None for end in ends)
        worse._rendezvous.shutdown()
    assert done == [Do.LEAVE, Do.RESTART if spares == 1 else Do.LEAVE]
    assert excluded(one.run) == ["n0", "n1"][:spares]


def test_the_message_is_that_of_the_rank_at_fault(one: Launch) -> None:
    printed: list[str] = []
    member = module._Member(one, connect(one.endpoint, 5.0), printed.append, Waiting(lambda _: None), print)
    one.run.mkdir()
    failures = {
        0: SimpleNamespace(exitcode=Exit.LOST, message={"message": "CollectiveError: rank 1 is lost"}),
        1: SimpleNamespace(exitcode=1, message={"message": "ValueError: no width"}),
    }
    assert member._failed(failures) is Do.RESTART  # type: ignore[arg-type]
    assert printed == ["rank 1 crashed (exit code 1): ValueError: no width: restarts together with the other nodes"]


@pytest.mark.parametrize("code", [75, 76, 77])
def test_what_a_rank_has_written_down_itself(cluster: Cluster, one: Launch, code: int) -> None:
    """Exit codes 75 to 77 mean that the rank has recorded its own event; the launcher adds none."""
    cluster.start(nodes=1, n0=f"{code} 0")
    assert cluster.end() == {"n0": None}
    assert [event[0] for event in cluster.events()] == ["restart"]
    assert excluded(one.run) == []


def test_bad_input_stops_all_and_is_no_good_end(cluster: Cluster) -> None:
    cluster.start(nodes=2, n0="2", n1="75 wait")
    assert cluster.end() == {"n0": Do.STOP, "n1": Do.STOP}
    assert cluster.events() == [("failure", "n0", "the run cannot continue with this configuration")]
    assert cluster.announced == [("failed", "the run cannot continue with this configuration")]


def test_a_run_that_does_not_get_on(cluster: Cluster, one: Launch) -> None:
    cluster.start(nodes=1, max_restarts=1, n0="3")
    error = cluster.end()["n0"]
    assert isinstance(error, UserError)
    why = f"{one.run} has been restarted 1 times without a checkpoint after step 0"
    assert str(error) == f"{why}: see {one.run / 'events.jsonl'} for the failures"
    assert cluster.events()[-1] == ("failure", "n0", why)
    assert cluster.announced[-1] == ("failed", why)


def test_too_few_nodes(cluster: Cluster) -> None:
    cluster.start(nodes=2, wait=1.0, n0="0")
    error = cluster.end()["n0"]
    assert isinstance(error, UserError)
    why = "fewer than 2 nodes have joined within 1 s"
    assert str(error) == f"{why}: start more nodes, or set a smaller --nodes"
    assert cluster.events() == [("failure", "n0", why)]
    assert cluster.announced == [("failed", why)]


@pytest.mark.in_turn(1, 3)
def test_the_rendezvous_ends_before_the_run(one: Launch, tmp_path: Path) -> None:
    serving = [sys.executable, "-c", SERVE]
    with subprocess.Popen(serving, stdin=PIPE, stdout=PIPE, text=True) as process, ThreadPoolExecutor() as pool:
        assert process.stdout is not None
        endpoint = f"127.0.0.1:{int(process.stdout.readline())}"
        (tmp_path / "n0").write_text("wait")
        command = [sys.executable, "-c", RANK, str(tmp_path / "n0")]
        future = pool.submit(run_node, replace(one, endpoint=endpoint), command)
        connect(endpoint, 5.0).get("optimus/world")
        process.kill()
        with pytest.raises(
            UserError, match=f"node n0 has lost the rendezvous {endpoint}: its network link is broken, or the "
        ):
            future.result(30)


def test_an_excluded_node(one: Launch) -> None:
    exclude(one.run.parent, "n1")
    exclude(one.run.parent, "n0")
    with pytest.raises(
        UserError,
        match=r"node n0 is excluded from .*: start another node, or repair this node and remove it from .*excluded.txt",
    ):
        run_node(replace(one, run=one.run.parent), ["true"])


def test_clocks_far_apart(one: Launch, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    module._check_clocks(one, store)
    for ahead in (-1.5, 1.5):  # a node counts as dead after 4 s
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda ahead=ahead: time.time() + ahead))
        module._check_clocks(replace(one, node="n1"), store)
    for ahead, how in ((-50, "50 s behind"), (50, "50 s ahead of")):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda ahead=ahead: time.time() + ahead))
        with pytest.raises(UserError, match=f"the clock of node n1 is {how} that of node n0, .*: set both by NTP"):
            run_node(replace(one, node="n1"), ["true"])


def test_nobody_answers_at_the_rendezvous(one: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # does not listen
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"no rendezvous answers at {endpoint} .*: start `optimus rendezvous"):
            run_node(replace(one, endpoint=endpoint, wait=0.6), ["true"])


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":29400", "host:port", "host:0", "host:65536", "host:-1"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(UserError, match=f"--rendezvous {endpoint}: give the HOST:PORT"):
        parse(endpoint)


def test_an_endpoint_that_is_nowhere() -> None:
    with pytest.raises(UserError, match=r"this machine has no route to the rendezvous no-such-host\.invalid:29400"):
        own_address("no-such-host.invalid:29400")
    with pytest.raises(UserError, match=r"no rendezvous answers at no-such-host\.invalid:29400"):
        connect("no-such-host.invalid:29400", 0.1)


def test_another_server_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimus.launch.store.timedelta", lambda seconds: timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def end_all() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=end_all, daemon=True).start()
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            UserError, match=rf"^another server answers at {endpoint} \(.*\): start `optimus rendezvous"
        ):
            connect(endpoint, 1.0)
        server.shutdown(socket.SHUT_RDWR)


def test_ports(store: TCPStore) -> None:
    assert parse(f"127.0.0.1:{store.port}") == ("127.0.0.1", store.port)
    assert own_address(f"127.0.0.1:{store.port}") == "127.0.0.1"
    store.set("key", "value")
    assert connect(f"127.0.0.1:{store.port}", 5.0).get("key") == b"value"
    with pytest.raises(UserError, match=rf"port {store.port} is in use on this machine \(.*\): choose another --port"):
        serve(store.port)
    for port in (-1, 65536):
        with pytest.raises(UserError, match=f"--port {port}: give a number"):
            serve(port)


def listening(pid: int | None = None) -> dict[int, str]:
    """Returns the ports on which a process listens, with their addresses."""
    found = [each.laddr for each in psutil.Process(pid).net_connections() if each.status == psutil.CONN_LISTEN]
    return {each.port: each.ip for each in found}


def test_a_store_listens_on_the_given_address_alone(store: TCPStore) -> None:
    assert listening()[store.port] == "127.0.0.1"
    everywhere = serve(0, "0.0.0.0")
    assert listening()[everywhere.port] == "0.0.0.0"
    named = serve(0, "localhost")
    assert connect(f"127.0.0.1:{named.port}", 5.0)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("192.0.2.1", r"--address 192\.0\.2\.1: this machine has no such address \(.*\); `hostname -I` lists"),
        ("no-such-host.invalid", r"--address no-such-host\.invalid: the name is unknown \(.*\); `hostname -I` lists"),
        ("head", "--address head: on this machine the name stands for 127.0.1.1, which no other machine reaches"),
    ],
)
def test_an_address_at_which_nobody_would_come(monkeypatch: pytest.MonkeyPatch, address: str, message: str) -> None:
    look_up = socket.getaddrinfo
    names = {"head": "127.0.1.1"}  # as on Debian
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *args: look_up(names.get(name, name), *args))
    with pytest.raises(UserError, match=message):
        serve(0, address)


def test_who_writes_into_the_store_is_found_out(cluster: Cluster, store: TCPStore, one: Launch) -> None:
    store.set("torch.rendezvous.optimus", b64encode(pickle.dumps("no state")))
    cluster.start(nodes=1, n0="0")
    assert re.match(
        f"the store has no state of a rendezvous, but a str; another program writes to {one.endpoint}: start an ",
        str(cluster.end()["n0"]),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("clock", b"["), ("clock", b'["n1", 1e999]'), ("clock", b"3"), ("holder", b"\xff\0"), ("world", b'{"n0": 1}')],
)
def test_what_no_node_has_written_into_the_store(
    cluster: Cluster, store: TCPStore, one: Launch, key: str, value: bytes
) -> None:
    store.set(f"optimus/{key}", value)
    cluster.start(nodes=1, n0="0")
    said = f"the value of '{key}' in the store does not .*; another program writes to {one.endpoint}: start an "
    assert re.match(said, str(cluster.end()["n0"]))


def test_ranks_of_one_machine_meet_where_no_other_reaches_them() -> None:
    params = RendezvousParameters(register(), "", "a run", 1, 1)
    meeting = rendezvous_handler_registry.create_handler(params)
    info = meeting.next_rendezvous()
    place = info.bootstrap_store_info
    assert place is not None
    assert (info.rank, info.world_size) == (0, 1)
    assert listening()[place.master_port] == place.master_addr == "127.0.0.1"
    assert meeting.use_agent_store


def test_keep_alive() -> None:
    assert parse_keep_alive("5x3") == (5, 3)
    for text in ("", "5", "x3", "5x", "0x3", "5x0", "-1x3", "1.5x3", "5x3x2", "\u00b2x3"):
        with pytest.raises(UserError, match=f"--keep-alive {text}: give SECONDSxNUMBER"):
            parse_keep_alive(text)


@pytest.fixture
def config(small_run: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_run))
    return path


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 2, "spares": -1}, "--spares -1"),
        ({"nodes": 2, "ranks_per_node": 0}, "--ranks-per-node 0"),
        ({"nodes": 3}, "train.global_batch 8 is not a multiple of 3 data-parallel ranks"),
    ],
)
def test_numbers_of_nodes_that_make_no_sense(config: Path, numbers: dict[str, int], message: str) -> None:
    for start in (launch, check_launch):
        with pytest.raises(UserError, match=message):
            start(NodeJob(config, **numbers), "127.0.0.1:1")
    with pytest.raises(UserError, match=message):
        write_batch_script(NodeJob(config, **numbers), scheduler="slurm", path=config.with_name("job.sh"))


def test_a_check_validates_everything_and_starts_nothing(
    config: Path, small_run: dict[str, Any], tmp_path: Path
) -> None:
    """`--check` needs no store, reads all data, and refuses the name of an excluded node."""
    words = ["launch", str(config), "--check", "--nodes=2", "--spares=1", "--node=n0", "train.micro_batch=2"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert f"{config} is ready to run: 6 steps on 2 rank(s) of 2 node(s), with 1 spare(s)\n" in done.output
    ready = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)
    assert (ready["ok"], ready["ranks"], ready["nodes"], ready["spares"]) == (True, 2, 2, 1)
    assert ready["placement"] == describe(Mesh.from_sizes(2, ranks_per_node=1))  # not both on this one
    assert not list((tmp_path / "run").glob("*"))

    with pytest.raises(UserError, match="--rendezvous nowhere: give the HOST:PORT"):
        check_launch(NodeJob(config, nodes=2), "nowhere")
    with pytest.raises(UserError, match="--check: leave it out with --scheduler"):
        CliRunner().invoke(cli.app, [*words[:3], "--scheduler=slurm"], catch_exceptions=False)
    with pytest.raises(UserError, match=r"^resilience\.exit_codes\.77: exit code 77 is no crash"):
        check_launch(NodeJob(config, ["resilience.exit_codes.77=software"], nodes=2), "127.0.0.1:1")
    data = tmp_path / "data"
    shutil.copytree(small_run["data"]["path"], data)
    shard = max(data.rglob("*"), key=lambda path: path.stat().st_size if path.suffix != ".json" else 0)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(shard.name)):
        check_launch(NodeJob(config, [f"data.path={data}"], nodes=2), "127.0.0.1:1")
    (tmp_path / "run").mkdir(exist_ok=True)
    exclude(tmp_path / "run", "n0")
    with pytest.raises(UserError, match="node n0 is excluded from "):
        check_launch(NodeJob(config, nodes=2), "127.0.0.1:1", "n0")


SAVES = """
import signal, sys, time
from pathlib import Path
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3)
    Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
Path(sys.argv[1]).write_text("trains")
time.sleep(60)
"""

AGENT = """
import sys
import threading
from pathlib import Path
from optimus.launch.node import Launch, run_node
from optimus.launch.store import serve
store = serve(0)
folder = Path(sys.argv[1])
launch = Launch("", run=folder / "run", node="n0", endpoint=f"127.0.0.1:{store.port}", keep_alive=(1, 4), wait=20.0)
sys.exit(run_node(launch, [sys.executable, str(folder / "saves.py"), str(folder / "state")], lambda *_: None))
"""


@pytest.mark.in_turn(2, 3)
def test_ranks_save_however_often_their_node_is_told_to_end(tmp_path: Path) -> None:
    """A batch system signals all processes of a job, and its script signals the node twice more."""
    (tmp_path / "saves.py").write_text(SAVES)
    state = tmp_path / "state"
    node = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not state.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for _ in range(5):
        node.send_signal(signal.SIGTERM)
        time.sleep(0.4)
    said = node.communicate(timeout=300)[1]
    assert node.returncode == 143, said
    assert state.read_text() == "saved"
    assert "Traceback" not in said
