"""One node of a launch: joins the other nodes, runs its ranks, and responds to failed ranks."""

import json
import math
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from torch.distributed import DistError, Store
from torch.distributed.elastic.rendezvous import api

from optimus.checkpoint.folder import list_checkpoints, step_of
from optimus.checkpoint.lease import Lease
from optimus.disk import file_system_time
from optimus.errors import UserError, first_line, naming_disk_errors
from optimus.launch.store import connect, own_address
from optimus.launch.torch_elastic import Agent, ProcessFailure, Rendezvous
from optimus.launch.waiting import Waiting
from optimus.resilience.events import EventLog
from optimus.resilience.exclusion import exclude, excluded
from optimus.resilience.exits import STOPPED, CrashKind, Exit, crash_kinds, error_in
from optimus.resilience.hangs import clear
from optimus.resilience.policy import LIMITS, Do, decide


@dataclass(frozen=True)
class NodeJob:
    """The settings that all nodes of a launch share. Raises `UserError` without nodes or without ranks per
    node, and for a number of spares or a waiting time that is negative or not finite."""

    config: str | Path
    overrides: Sequence[str] = ()
    nodes: int = 1
    spares: int = 0
    ranks_per_node: int = 1
    # Seconds between heartbeats, and number of missing heartbeats after which a node counts as dead.
    keep_alive: tuple[int, int] = (5, 3)
    wait: float = 600.0  # seconds that nodes have to join
    max_restarts: int = 5  # maximum number of restarts in a row without a new checkpoint
    rejoin_wait: float | None = None  # seconds that nodes have to join again after a failure; None: like `wait`

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1 or self.spares < 0:
            raise UserError(
                f"--nodes {self.nodes} --spares {self.spares} --ranks-per-node {self.ranks_per_node}: give at least 1 node, "
                "1 rank per node and 0 spares"
            )
        for option, seconds in (("--wait", self.wait), ("--rejoin-wait", self.rejoin_wait)):
            if seconds is not None and not 0 <= seconds < math.inf:
                raise UserError(f"{option} {seconds:g}: give a finite number of seconds, at least 0")

    @property
    def ranks(self) -> int:
        """Number of ranks that train."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Launch(NodeJob):
    """A job, with the settings of its launch on one node."""

    run: Path
    node: str
    endpoint: str
    name: str = "optimus"  # distinguishes launches in one store
    aborts: bool = False  # True if the backend aborts ranks that have lost another rank
    kinds: Mapping[int, CrashKind] = field(default_factory=crash_kinds)  # kinds of crashes, by exit code


def run_node(
    launch: Launch, command: Sequence[str], announce: Callable[[str, str], object] = lambda event, detail: None
) -> Do | Exit | None:
    """Runs this node's ranks, each as `command`, until the run ends on this node.

    Returns None (the job is done or no longer needs this node), an `Exit` (a signal has ended the run), `Do.LEAVE`
    (this node has left) or `Do.STOP` (a failure has stopped all nodes).

    Appends `--holder` and the lease's token to `command`. For each event `restarted` or `failed`, one node calls
    `announce(event, detail)`.
    """
    check_not_excluded(launch.run, launch.node)

    def say(what: str) -> None:
        print(f"node {launch.node}: {what}", file=sys.stderr, flush=True)  # standard output is for results

    waiting = Waiting(say)
    store = connect(launch.endpoint, launch.wait, waiting.on)
    waiting.over()
    try:
        _check_clocks(launch, store)
        with _holding(launch, store) as token:
            return _Member(launch, store, say, waiting, announce).run([*command, "--holder", token])
    except (api.RendezvousConnectionError, DistError) as error:
        raise UserError(
            f"node {launch.node} has lost the rendezvous {launch.endpoint}: its network link is broken, or the rendezvous "
            f"has ended ({first_line(error)})"
        ) from error
    except api.RendezvousStateError as error:
        raise UserError(
            f"{error}; another program writes to {launch.endpoint}: start an `optimus rendezvous` that it cannot reach"
        ) from error


def check_not_excluded(run: Path, node: str) -> None:
    """Raises `UserError` when the node is excluded from the run."""
    if node in excluded(run):
        raise UserError(
            f"node {node} is excluded from {run}: start another node, or repair this node and remove it from "
            f"{run / 'excluded.txt'}"
        )


class _Member:
    """Runs this node's ranks until the run ends on this node."""

    def __init__(
        self,
        launch: Launch,
        store: Store,
        say: Callable[[str], None],
        waiting: Waiting,
        announce: Callable[[str, str], object],
    ) -> None:
        self._launch, self._store, self._say, self._waiting, self._announce = launch, store, say, waiting, announce
        self._round = 0  # round of the rendezvous that formed this node's current world
        self._events = EventLog(launch.run)
        self._rendezvous = Rendezvous.for_launch(
            store,
            launch.name,
            launch.nodes,
            own_address(launch.endpoint),
            keep_alive=launch.keep_alive,
            wait=launch.wait,
            died=self._died,
            waiting=waiting.on,
        )

    def run(self, command: Sequence[str]) -> Do | Exit | None:
        if self._rendezvous.is_closed():
            self._come_too_late()
            return None
        try:
            with tempfile.TemporaryDirectory(prefix="optimus-ranks-") as logs:
                outcome = Agent(
                    self._rendezvous,
                    command,
                    self._launch.ranks_per_node,
                    joined=self._joined,
                    failed=self._failed,
                    logs=Path(logs),
                    say=self._say,
                ).until_the_end()
        except api.RendezvousTimeoutError as error:
            why = f"fewer than {self._launch.nodes} nodes have joined within {self._rendezvous.wait:g} s"
            # Without a world no node has rank 0, so the first node to increment the counter reports the failure.
            if self._store.add(self._key("few"), 1) == 1:
                self._note_silent(self._told("world") or [])
                self._events.write("failure", node=self._launch.node, detail=why)
                self._announce("failed", why)
                clear(self._launch.run)
            raise UserError(f"{why}: start more nodes, or set a smaller --nodes") from error
        if (why := self._told("stopped")) is not None:
            self._say(f"the run has been stopped: {why}; see {self._events.path}")
            return Do.STOP
        return outcome

    def _come_too_late(self) -> None:
        """Prints that the launch has ended because the run has finished.

        Raises `UserError` if the run has not finished.
        """
        why = f"the launch {self._launch.name} at {self._launch.endpoint} has ended already"
        cure = "to train again, give another --name or restart `optimus rendezvous`"
        if [event["kind"] for event in self._events.read()][-1:] != ["finished"]:
            raise UserError(f"{why}: {cure}")
        self._say(f"{why}, because the run has finished; {cure}")

    def _joined(self, number: int, node_rank: int, nodes: int, store: Store) -> None:
        """Reports this node's ranks in a new world. Node 0 also records the world and any restart."""
        self._waiting.over()
        if self._launch.rejoin_wait is not None:
            self._rendezvous.wait = self._launch.rejoin_wait
        first, each = node_rank * self._launch.ranks_per_node, self._launch.ranks_per_node
        ranks = f"rank {first}" if each == 1 else f"ranks {first} to {first + each - 1}"
        self._say(f"joins as node {node_rank} of {nodes}: starts {ranks} of {each * nodes}")
        self._round = number
        store.set(f"member/{node_rank}", json.dumps([self._launch.node, self._rendezvous.member]))
        if node_rank > 0:
            return
        clear(self._launch.run)
        here = [_said(store.get(f"member/{rank}"), "member") for rank in range(nodes)]
        before = self._told("world")
        self._tell("world", here)
        if before is not None:
            self._note_silent(before)
        for _, member in here:  # other nodes may have reported a slow node as dead
            self._store.delete_key(self._key(f"died/{member}"))
        if before is None:
            return
        causes = [event["detail"] for event in self._events.unrecovered()]
        there = f"on nodes {', '.join(name for name, _ in here)}"
        self._events.write("restart", node=self._launch.node, detail=there)
        self._check_progress()
        self._announce("restarted", "; ".join([there, *causes]))

    def _died(self, member: str) -> None:
        self._store.compare_set(self._key(f"died/{member}"), "", str(time.time()))

    def _note_silent(self, before: Sequence[tuple[str, str]]) -> None:
        silent = math.prod(self._launch.keep_alive)
        for name, member in before:
            if (noticed := self._told(f"died/{member}")) is not None:
                detail = f"node {name} has been silent for {silent} s"
                self._events.write("failure", node=name, seconds=silent + time.time() - noticed, detail=detail)

    def _failed(self, failures: dict[int, ProcessFailure]) -> Do | Exit:
        crashes = {kind: self._crashes(kind) for kind in LIMITS}
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        decision = decide(codes, crashes, self._rendezvous.spares(), self._launch.aborts, self._launch.kinds)
        if decision.do is Do.LEAVE and not self._claim_spare():
            decision = decide(codes, crashes, 0, self._launch.aborts, self._launch.kinds)
        of_cause = [failures[decision.rank]] if decision.rank is not None else failures.values()
        said = [text for failure in of_cause if (text := error_in(failure.message))]
        detail = f"{decision.detail}: {said[0]}" if said else decision.detail
        if decision.crash is not None:
            self._crashes(decision.crash, 1)
        has_told = Exit.BAD_NODE in codes.values()  # a rank has logged the failure already
        if (decision.crash is not None or decision.do is Do.STOP) and not has_told:
            self._events.write("failure", node=self._launch.node, rank=decision.rank, detail=detail)
        if decision.do is Do.STOP:
            self._stop(detail)
        if decision.do is Do.LEAVE:
            exclude(self._launch.run, self._launch.node)
            self._events.write("exclusion", node=self._launch.node, rank=decision.rank, detail=decision.detail)
        self._say(f"{detail}: {_DOING[decision.do]}")
        return decision.do

    def _crashes(self, kind: CrashKind, more: int = 0) -> int:
        """Adds `more` to the number of this node's crashes of a kind, and returns the sum."""
        return int(self._store.add(self._key(f"crashes/{kind}/{self._launch.node}"), more))

    def _claim_spare(self) -> bool:
        """Claims a spare to replace this node. Returns False if no unclaimed spare is left.

        The store records all claims, because a node's list of present nodes may be seconds old.
        """
        claims = f"leaving/{self._round}"
        number = self._store.add(self._key(claims), 1)
        self._tell(f"{claims}/{number}", self._rendezvous.member)
        here = self._rendezvous.present()
        # An earlier claim counts if its node is present, or if the claim does not name its node yet. A failed claim
        # has an empty name, and does not count.
        told = [self._told(f"{claims}/{earlier}") for earlier in range(1, number)]
        claimed = sum(member is None or member in here for member in told)
        if self._rendezvous.spares() > claimed:
            return True
        self._tell(f"{claims}/{number}", "")
        return False

    def _check_progress(self) -> None:
        """Stops all nodes and raises `UserError` after more than `max_restarts` restarts in a row without a new
        checkpoint."""
        found = list_checkpoints(self._launch.run)
        newest = step_of(found[-1]) if found else 0
        step, restarts = self._told("progress") or (-1, 0)
        restarts = restarts + 1 if step == newest else 1
        self._tell("progress", (newest, restarts))
        if restarts > self._launch.max_restarts:
            often = f"{self._launch.max_restarts} times without a checkpoint after step {newest}"
            why = f"{self._launch.run} has been restarted {often}"
            self._events.write("failure", node=self._launch.node, step=newest, detail=why)
            self._stop(why)
            self._rendezvous.shutdown()
            raise UserError(f"{why}: see {self._events.path} for the failures")

    def _stop(self, why: str) -> None:
        """Tells all nodes that the run has failed; the first node that calls this method announces the failure."""
        self._tell("stopped", why)
        if self._store.add(self._key("stops"), 1) == 1:
            self._announce("failed", why)

    def _key(self, name: str) -> str:
        return f"{self._launch.name}/{name}"

    def _tell(self, name: str, value: object) -> None:
        self._store.set(self._key(name), json.dumps(value))

    def _told(self, name: str) -> Any:
        key = self._key(name)
        return _said(self._store.get(key), name.partition("/")[0]) if self._store.check([key]) else None


_DOING: dict[Do | Exit, str] = {
    **dict.fromkeys(STOPPED, "ends, and so do all other nodes"),
    Do.RESTART: "restarts together with the other nodes",
    Do.LEAVE: "leaves, and a spare replaces it",
    Do.STOP: "stops, and so do all other nodes",
}


_Named = tuple[str, str]  # the name of a node, and the node's name in the rendezvous
_SAID: dict[str, TypeAdapter[Any]] = {  # types of values in the store, by kind of key
    "member": TypeAdapter(_Named),
    "world": TypeAdapter(list[_Named]),
    "died": TypeAdapter(float),
    "leaving": TypeAdapter(str),
    "progress": TypeAdapter(tuple[int, int]),
    "stopped": TypeAdapter(str),
    "clock": TypeAdapter(tuple[str, FiniteFloat]),
}


def _said(value: bytes, what: str) -> Any:
    """Parses a value from the store. Raises `RendezvousStateError` for an invalid value."""
    try:
        return _SAID[what].validate_json(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise api.RendezvousStateError(
            f"the value of '{what}' in the store does not come from a node of this launch: {problem}"
        ) from error


@contextmanager
def _holding(launch: Launch, store: Store) -> Iterator[str]:
    """Holds the lease of the run folder together with the other nodes of the launch, and yields the token of the
    lease."""
    token = store.compare_set(f"{launch.name}/holder", "", uuid.uuid4().hex).decode("utf-8", "replace")
    if re.fullmatch("[0-9a-f]{32}", token) is None:
        raise api.RendezvousStateError(
            f"the value of 'holder' in the store does not come from a node of this launch: {token!r}"
        )
    with Lease(launch.run, token, several=launch.nodes + launch.spares > 1) as lease:
        store.add(f"{launch.name}/holders", 1)
        try:
            yield token
        finally:
            try:
                lease.retained = store.add(f"{launch.name}/holders", -1) > 0
            except DistError:  # other nodes may still hold the lease
                lease.retained = True


def _check_clocks(launch: Launch, store: Store) -> None:
    """Raises `UserError` when the clocks of this node and the first node differ too much."""
    with naming_disk_errors(launch.run, "Name a folder that all nodes share"):
        launch.run.mkdir(parents=True, exist_ok=True)
        ahead = time.time() - file_system_time(launch.run)
    key = f"{launch.name}/clock"
    other, theirs = _said(store.compare_set(key, "", json.dumps([launch.node, ahead])), "clock")
    limit = math.prod(launch.keep_alive) / 2
    if abs(ahead - theirs) > limit:
        raise UserError(
            f"the clock of node {launch.node} is {abs(ahead - theirs):.0f} s {'ahead of' if ahead > theirs else 'behind'} "
            f"that of node {other}, more than half of the {2 * limit:g} s after which a silent node is dead: set both by NTP"
        )
