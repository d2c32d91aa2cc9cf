"""All uses of TorchElastic's private API.

Remedies for torchrun of torch 2.13, for its support of spare nodes (1 to 5), and its trust in networks (6, 7) and
clocks (8):

1. A survivor that stays rank 0 does not publish the ranks' store again. Here, every world gets a new store.
2. A waiting spare makes a full world restart for ever. Here, no node counts as waiting while the world is full.
3. An unused spare ends with an error when the job is done. Here, a closed rendezvous ends a spare without error.
4. A failing agent closes the rendezvous for all nodes. Here, a node can leave without closing the rendezvous.
5. A spare that gets no free position stays on the wait list of the next round and times out. Here, nodes on the wait
   list become spares again while the world is full.
6. torchrun unpickles the state without checks. Here, `_Unpickler` admits only the classes of a rendezvous state.
7. The ranks' store listens on all interfaces. Here, the store listens only on the address of its node.
8. Each node compares the times of all heartbeats with its own clock: a wrong clock kills nodes. Here, a node counts as
   dead if its heartbeat does not change while another node watches.
"""

import io
import logging
import math
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousInfo, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from optimus.launch.store import serve
from optimus.observe.signals import ending_signals
from optimus.resilience.exits import SAVING, Exit, told_torch_elastic
from optimus.resilience.policy import Do

_LEAVE_SECONDS = 60  # seconds that a node has to leave the rendezvous
_LEAVE_TRIES = 20  # attempts that it has at least, since a busy machine may stop it for all of these seconds
_NEVER = datetime.min.replace(tzinfo=timezone.utc)  # a heartbeat that any clock finds too old
_LAST_WORDS = 2  # seconds from SIGTERM to SIGKILL after a failure


class _Unpickler(pickle.Unpickler):
    """Admits only the classes of a rendezvous state."""

    _ADMITTED = {  # noqa: RUF012
        dynamic.__name__: ("_RendezvousState", "_NodeDesc"),
        "datetime": ("datetime", "timedelta", "timezone"),
        "builtins": ("set",),
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not a class of a rendezvous state")
        return super().find_class(module, name)


class _Backend(C10dRendezvousBackend):
    """Checks the contents of the store before the state holder unpickles the state."""

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        found = super()._decode_state(base64_state)
        if found is not None:
            try:
                state = _Unpickler(io.BytesIO(found[0])).load()
            except Exception as error:  # arbitrary bytes may raise anything
                raise RendezvousStateError(f"the store has no state of a rendezvous: {error}") from error
            if not isinstance(state, dynamic._RendezvousState):
                raise RendezvousStateError(f"the store has no state of a rendezvous, but a {type(state).__name__}")
        return found


class _StateHolder(dynamic._BackendRendezvousStateHolder):
    """Finds dead nodes, and reports those that this node removes from the state.

    A node is dead if its heartbeat has not changed during `keep_alive_max_attempt` intervals of this node's monotonic
    clock. The time between two looks counts as one interval at most, since all nodes may have been stopped together.
    While the world is full, turns waiting nodes into spares.
    """

    def __init__(
        self, backend: C10dRendezvousBackend, settings: dynamic.RendezvousSettings, died: Callable[[str], None]
    ) -> None:
        super().__init__(backend, settings)
        self._died = died
        self._silences: dict[Any, tuple[datetime, float]] = {}  # by node: last heartbeat, seconds without a new one
        self._looked = time.monotonic()
        self.seen: Callable[[dynamic._RendezvousState], None] | None = None  # called with the state after each sync

    def sync(self) -> bool | None:
        has_set = super().sync()
        if self.seen is not None:
            self.seen(self.state)
        return has_set

    def _silence(self, heartbeats: dict[Any, datetime]) -> dict[Any, float]:
        """Returns by node the seconds that this node has watched without a new heartbeat."""
        now = time.monotonic()
        passed = min(now - self._looked, self._settings.keep_alive_interval.total_seconds())
        before, self._looked = self._silences, now
        self._silences = {
            node: (beat, before[node][1] + passed if node in before and before[node][0] == beat else 0.0)
            for node, beat in heartbeats.items()
        }
        return {node: seconds for node, (_, seconds) in self._silences.items()}

    def _sanitize(self) -> None:
        heartbeats, now = self._state.last_heartbeats, datetime.now(timezone.utc)
        stored = dict(heartbeats)
        most = (self._settings.keep_alive_interval * self._settings.keep_alive_max_attempt).total_seconds()
        for node, seconds in self._silence(stored).items():  # the base class removes nodes with old heartbeats
            heartbeats[node] = _NEVER if seconds > most else now
        super()._sanitize()
        for node in heartbeats:  # a node beats only if its last heartbeat is in the past
            heartbeats[node] = min(stored[node], now)
        for node in self._dead_nodes:
            self._died(repr(node))
        state = self._state
        if state.wait_list and state.complete and len(state.participants) >= self._settings.max_nodes:
            state.redundancy_list |= state.wait_list
            state.wait_list.clear()
            self.mark_dirty()


class _Leave(dynamic._RendezvousExitOp):
    """Leaves the rendezvous; fails after `deadline` and `_LEAVE_TRIES` attempts."""

    def __init__(self) -> None:
        self._tries = 0

    def __call__(self, ctx: dynamic._RendezvousContext, deadline: float) -> dynamic._Action:
        self._tries += 1
        return super().__call__(ctx, deadline if self._tries > _LEAVE_TRIES else math.inf)


class Rendezvous(dynamic.DynamicRendezvousHandler):
    """The rendezvous of nodes. Also names the present nodes, counts the spares, and lets a node leave."""

    _state_holder: _StateHolder
    _waiting: Callable[[str], None]  # called with a description of what this node waits for

    @classmethod
    def for_launch(
        cls,
        store: Store,
        name: str,
        nodes: int,
        address: str,
        *,
        keep_alive: tuple[int, int],
        wait: float,
        died: Callable[[str], None],
        waiting: Callable[[str], None] = lambda _: None,
    ) -> "Rendezvous":
        """Returns the rendezvous of the launch `name`. `nodes` nodes must join within `wait` seconds.

        `keep_alive` is (seconds between heartbeats, missing heartbeats after which a node counts as dead). The
        rendezvous calls `died` with the `member` name of a dead node, and repeatedly calls `waiting` with a description
        of what this node waits for.
        """
        settings = dynamic.RendezvousSettings(
            name,
            nodes,
            nodes,
            dynamic.RendezvousTimeout(join=timedelta(seconds=wait), last_call=timedelta(seconds=1)),
            keep_alive_interval=timedelta(seconds=keep_alive[0]),
            keep_alive_max_attempt=keep_alive[1],
        )
        backend = _Backend(store, name)
        holder = _StateHolder(backend, settings, died)
        made = cls(cls._node_desc_generator.generate(address), settings, backend.name, store, holder)
        made._waiting = waiting
        return made

    @property
    def wait(self) -> float:
        """The number of seconds that the nodes have to join."""
        return self._settings.timeout.join.total_seconds()

    @wait.setter
    def wait(self, seconds: float) -> None:
        self._settings.timeout._set_timeouts(join=timedelta(seconds=seconds))

    def next_rendezvous(self) -> RendezvousInfo:
        self._shared_tcp_store_server = self._bootstrap_store_info = None  # forget the previous world's store
        self._state_holder.seen = self._tell
        try:
            return super().next_rendezvous()
        finally:
            self._state_holder.seen = None

    def _tell(self, state: dynamic._RendezvousState) -> None:
        """Reports what this node waits for."""
        here, most = len(state.participants), self._settings.max_nodes
        if state.closed or (state.complete and self._this_node in state.participants):
            return
        if not state.complete:
            self._waiting(f"nodes: {here} of {most} have joined")
        elif here >= most:
            self._waiting(f"a free position, as a spare: all {most} are taken")
        else:
            self._waiting(f"{here} of {most} nodes to stop their ranks, so that all nodes restart together")

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return serve(master_port, master_addr)

    @property
    def member(self) -> str:
        """The name of this node in the rendezvous."""
        return repr(self._this_node)

    def num_nodes_waiting(self) -> int:
        waiting = super().num_nodes_waiting()
        return 0 if len(self._state_holder.state.participants) >= self._settings.max_nodes else waiting

    def present(self) -> set[str]:
        """Returns the `member` names of all nodes in the last known state."""
        state = self._state_holder.state
        return {repr(node) for node in (*state.participants, *state.wait_list, *state.redundancy_list)}

    def spares(self) -> int:
        """Returns the number of spare nodes in the last known state."""
        return max(0, len(self.present()) - self._settings.max_nodes)

    def leave(self) -> None:
        """Removes this node from the rendezvous without closing the rendezvous."""
        self._stop_heartbeats()
        self._op_executor.run(_Leave(), time.monotonic() + _LEAVE_SECONDS)


class Agent(LocalElasticAgent):
    """Starts and watches the ranks of one node, together with the agents of the other nodes.

    When a new world has formed, the agent calls `joined` before the ranks start. The arguments of `joined` are the
    number of the world, the index of this node, the number of nodes and the store. The agent calls `failed` with this
    node's failed ranks by global rank, and does what `failed` returns.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        command: Sequence[str],
        ranks: int,
        *,
        joined: Callable[[int, int, int, Store], None],
        failed: Callable[[dict[int, ProcessFailure]], Do | Exit],
        logs: Path,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.rendezvous = rendezvous
        self._joined, self._failed, self._say = joined, failed, say
        spec = WorkerSpec(
            role="default",
            local_world_size=ranks,
            rdzv_handler=rendezvous,
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=0,
            monitor_interval=0.2,
            local_addr=rendezvous._this_node.addr,
        )
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `failed` reports failures
        told_torch_elastic()
        super().__init__(spec, DefaultLogsSpecs(str(logs)), exit_barrier_timeout=60)
        self._shutdown_timeout = SAVING  # torch 2.13 passes this value to `_shutdown`; 2.11 passes none

    def until_the_end(self) -> Do | Exit | None:
        """Runs the ranks and returns the outcome. None: the launch has ended; a `Do`: this node has left, or all nodes
        must stop; an `Exit`: a signal has ended the ranks."""
        try:
            self._outcome: Do | Exit | None = None
            self.run()
            return self._outcome
        except RendezvousClosedError:
            self._say("is no longer needed: the launch has ended")
            return None  # another node has closed the rendezvous
        except SignalException as error:  # the ranks have received the signal too
            self._say(
                f"ends, because it has received {error.sigval.name}; its ranks have finished their step and saved"
            )
            return Exit(128 + error.sigval)
        finally:  # a thread that still uses the store when Python ends aborts the process
            self.rendezvous._stop_heartbeats()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SAVING) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stops the ranks by SIGTERM, and by SIGKILL after `_LAST_WORDS` seconds."""
        self._shutdown(timeout=_LAST_WORDS)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        state = self.rendezvous._state_holder.state
        store = worker_group.store
        assert store is not None
        assert worker_group.group_rank is not None
        self._joined(state.round, worker_group.group_rank, len(state.participants), store)

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            return self._watch()
        except SignalException:  # ignore a second signal, from a batch system or its script
            for number in ending_signals():
                signal.signal(number, signal.SIG_IGN)
            raise

    def _watch(self) -> RunResult:
        """Starts the ranks, and restarts them after failures, until the run ends or this node has to leave."""
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                self._say("has finished: waits for the ranks of the other nodes")
                self._exit_barrier()
                self.rendezvous.shutdown()  # ends the wait of the spares
                return result
            if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                self._stop_workers(group)
                outcome = self._failed(result.failures)
                if outcome is not Do.RESTART:
                    self._outcome = outcome
                    self.rendezvous.leave() if outcome is Do.LEAVE else self.rendezvous.shutdown()
                    return result
                self._initialize_workers(group)
            elif self.rendezvous.num_nodes_waiting() > 0:
                self._say("stops its ranks: another node is lost or has stopped its ranks")
                self._restart_workers(group)
