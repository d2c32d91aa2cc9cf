"""A cluster on one machine, to rehearse node failures.

Hosts are network namespaces (Linux, root) that a bridge joins. Without namespaces, hosts are process groups on this
machine.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from optimus.disk import user_path
from optimus.errors import UserError
from optimus.launch.here import check_run
from optimus.launch.nodes import NodeJob, exit_code, launch
from optimus.observe.signals import restore_handlers
from optimus.resilience.events import EventLog
from optimus.resolve.ranks import mesh_of
from optimus.testing.faults import FaultPlan, rank_program
from optimus.training.reading import read_run

_NETWORK = "10.77.0"
_PORT = 29400
_ETC = Path("/etc/netns")


@dataclass
class Lab:
    """Hosts of a cluster, and their processes."""

    hosts: list[str]
    endpoint: str
    isolated: bool  # True if hosts are network namespaces
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, host: str, command: Sequence[str], log: Path) -> None:
        """Starts a command on a host, and appends the output to `log`."""
        prefix = ["ip", "netns", "exec", host] if self.isolated else []
        with log.open("ab") as file:
            self._processes[host] = subprocess.Popen(
                [*prefix, *command], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, hosts: Sequence[str], seconds: float) -> dict[str, int | None]:
        """Returns the exit codes of the commands on `hosts`, or None for a command that still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        codes: dict[str, int | None] = {}
        for host in hosts:
            try:
                codes[host] = self._processes[host].wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[host] = None
        return codes

    def stop(self) -> None:
        """Kills all processes on the hosts.

        Without namespaces, kills the last command on each host, and the command's descendants.
        """
        for host, process in self._processes.items():
            for pid in self._pids(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # After the command has ended, another process may have the id, but not while the command's group exists.
            if process.poll() is None or not psutil.pid_exists(process.pid):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _pids(self, host: str) -> list[int]:
        """Returns the ids of all processes on a host.

        Without namespaces, returns only the ids of the last command's descendants.
        """
        if self.isolated:
            return [int(pid) for pid in _output("ip", "netns", "pids", host).split()]
        process = self._processes[host]
        if process.poll() is not None:  # another process may have the id now
            return []
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        return []


def rehearse(
    job: NodeJob,
    *,
    bandwidth: str | None = None,
    inject: str | Path | None = None,
    plain: bool = False,
    limit: float = 600.0,
    grace: float = 15.0,
    say: Callable[[dict[str, Any]], object] = lambda event: None,
) -> dict[str, Any]:
    """Launches `job` on nodes and spares created on this machine, with the faults in the file `inject`.

    The rehearsal ends when all nodes have ended. The function kills nodes that still run after `limit` seconds, or
    `grace` seconds after the run has finished. The output of each node goes to `lab/NODE.log` in the run folder. With
    `plain`, or without network namespaces, nodes are processes on one network.

    Returns a dict with `output`, `finished`, `exit_codes` by node, the new `events` and `isolated`.
    """
    tree, data = read_run(job.config, job.overrides)
    check_run(tree, data, mesh_of(tree, job.ranks, job.ranks_per_node), resume=True)
    program = [] if inject is None else rank_program(inject, job.ranks)
    isolated = not plain and namespaces_allowed()
    if inject is not None and any(fault.kind == "cut" for fault in FaultPlan.read(inject).faults) and not isolated:
        raise UserError(f"fault plan {inject}: links can be cut in network namespaces only (Linux, root, no --plain)")
    run = Path(tree.train.output)
    log, logs = EventLog(run), run / "lab"
    logs.mkdir(parents=True, exist_ok=True)
    before, said = len(log.read()), 0

    def finished() -> bool:
        return any(event["kind"] == "finished" for event in log.read()[before:])

    def say_new_events() -> None:
        nonlocal said
        new = log.read()[before + said :]
        said += len(new)
        for event in new:
            say(event)

    told = asdict(job) | {"config": str(user_path(job.config).absolute())}
    with lab(job.nodes + job.spares, isolated=isolated, bandwidth=bandwidth) as cluster:
        for number, host in enumerate(cluster.hosts):
            node = {"node": f"node{number}", "rendezvous": cluster.endpoint, "program": program}
            words = [sys.executable, "-m", "optimus.testing.lab", json.dumps([told, node])]
            cluster.start(host, words, logs / f"node{number}.log")
        deadline, ending = time.monotonic() + limit, False
        while time.monotonic() < deadline and None in cluster.wait(cluster.hosts, 0.0).values():
            time.sleep(0.2)
            say_new_events()
            if not ending and finished():
                ending, deadline = True, min(deadline, time.monotonic() + grace)
        codes = cluster.wait(cluster.hosts, 0.0)
    say_new_events()
    return {
        "output": str(run),
        "finished": finished(),
        "exit_codes": {f"node{number}": codes[host] for number, host in enumerate(cluster.hosts)},
        "events": log.read()[before:],
        "isolated": isolated,
    }


def namespaces_allowed() -> bool:
    """Returns True if this process can create network namespaces."""
    if shutil.which("ip") is None:
        return False
    name = f"optimus-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


@contextmanager
def lab(nodes: int, *, isolated: bool, bandwidth: str | None = None) -> Iterator[Lab]:
    """Creates a cluster of `nodes` nodes and a host for the store, for the duration of the context.

    `bandwidth`, for example 1Gbit, limits the sending rate of each host.
    """
    if bandwidth is not None and not isolated:
        raise UserError("--bandwidth needs network namespaces (Linux, root); leave out --bandwidth")
    tag = f"o{os.getpid()}"
    hosts = [f"{tag}n{number}" for number in range(nodes)]
    made = Lab(hosts, f"{_NETWORK}.1:{_PORT}" if isolated else f"127.0.0.1:{_free_port()}", isolated)
    names, switch = [f"{tag}store", *hosts], f"{tag}switch"
    with _signals_end_it() as ignore_signals:
        try:
            if isolated:
                _join_all(names, switch, bandwidth)
            address, _, port = made.endpoint.rpartition(":")
            made.start(names[0], [sys.executable, "-m", "optimus.launch.store", address, port], Path(os.devnull))
            yield made
        finally:
            ignore_signals()
            made.stop()
            for name in [*names, switch] if isolated else []:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
                shutil.rmtree(_ETC / name, ignore_errors=True)
            with suppress(OSError):  # fails without this folder, or if other labs use the folder
                _ETC.rmdir()


@contextmanager
def _signals_end_it() -> Iterator[Callable[[], None]]:
    """Makes SIGTERM and SIGHUP raise `SystemExit` inside the context.

    Ignored signals stay ignored. Yields a function that makes this process ignore SIGINT, SIGTERM and SIGHUP for the
    rest of the context. Outside the main thread, the context and the function do nothing.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield lambda: None
        return

    def end(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    ending = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, *ending)}
    for number in ending:
        if previous[number] is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, end)

    def ignore() -> None:
        for number in previous:
            signal.signal(number, signal.SIG_IGN)

    try:
        yield ignore
    finally:
        restore_handlers(previous)


def _join_all(names: Sequence[str], switch: str, bandwidth: str | None) -> None:
    """Creates a bridge in the namespace `switch`, and a namespace with a link to the bridge for each of `names`."""
    addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, start=1)}
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for number, (name, address) in enumerate(addresses.items(), start=1):
        _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
        if bandwidth is not None:
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", bandwidth,
                 "burst", "256kb", "latency", "100ms")  # fmt: skip
        own = _ETC / name  # the namespace's /etc, with host names instead of a name server
        own.mkdir(parents=True, exist_ok=True)
        (own / "resolv.conf").write_text("")
        # torch looks up the names of its peers by IPv4-mapped IPv6 addresses.
        known = "".join(f"{address} {name}\n::ffff:{address} {name}\n" for name, address in addresses.items())
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{known}{address} {socket.gethostname()}\n")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"the lab cannot make its hosts: `{' '.join(words)}` says: {done.stderr.strip()}. Network namespaces need Linux "
            "and root: otherwise use --plain"
        )


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main() -> None:
    """Runs a node in the lab."""
    job, node = json.loads(sys.argv[1])
    try:
        outcome = launch(NodeJob(**job), **node)
    except UserError as error:
        sys.exit(f"error: {error}")
    sys.exit(exit_code(outcome))


if __name__ == "__main__":
    _main()
