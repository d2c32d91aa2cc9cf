"""All that is used of TorchElastic's private parts, and why. `tests/launch/test_torch_elastic.py` says when it changes.

torchrun of torch 2.13 falls short of spare nodes in five ways, each mended here, and trusts its network in two more:

1. The ranks' store: a survivor that stays rank 0 does not tell the others its address again. Every world has one anew.
2. A spare that waits makes a full world restart for ever. No node counts as waiting while the world is full.
3. A spare that was never used ends with an error when the job is done. A closed rendezvous is its end.
4. An agent that fails closes the rendezvous for everybody. Here a node that leaves just leaves.
5. A spare that goes for a free place and comes too late stays on the list of those that wait for the next round, whose time
   runs out. While the world is full, it is a spare again.
6. It unpickles whatever the store holds. Here only what the state of a rendezvous is made of is admitted.
7. The ranks' store listens on all interfaces. Here it does on the address of its node alone.
"""

import io
import logging
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
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
from optimus.resilience.exits import SAVING, Exit, told_torch_elastic
from optimus.resilience.policy import Do

_LEAVING = 60  # seconds for the others to learn that a node gives up its place; a busy machine stops for some
_LAST_WORDS = 2  # seconds that ranks have to end by themselves


class _Unpickler(pickle.Unpickler):
    """Admits the classes that the state of a rendezvous is made of, none of which does anything when it is made."""

    _ADMITTED = {  # noqa: RUF012
        dynamic.__name__: ("_RendezvousState", "_NodeDesc"),
        "datetime": ("datetime", "timedelta", "timezone"),
        "builtins": ("set",),
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no business in it")
        return super().find_class(module, name)


class _Backend(C10dRendezvousBackend):
    """Looks at what the store holds before its base unpickles it."""

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        found = super()._decode_state(base64_state)
        if found is not None:
            try:
                state = _Unpickler(io.BytesIO(found[0])).load()
            except Exception as error:  # whatever bytes lead to
                raise RendezvousStateError(f"the store holds no state of a rendezvous: {error}") from error
            if not isinstance(state, dynamic._RendezvousState):
                raise RendezvousStateError(f"the store holds no state of a rendezvous: a {type(state).__name__}")
        return found


class _StateHolder(dynamic._BackendRendezvousStateHolder):
    """Tells of nodes that are taken out because they are silent; once that is written, no other node sees it. And whoever
    waits while the world is full is a spare."""

    def __init__(
        self, backend: C10dRendezvousBackend, settings: dynamic.RendezvousSettings, died: Callable[[str], None]
    ) -> None:
        super().__init__(backend, settings)
        self._died = died
        self.seen: Callable[[dynamic._RendezvousState], None] | None = None  # is told of every state

    def sync(self) -> bool | None:
        has_set = super().sync()
        if self.seen is not None:
            self.seen(self.state)
        return has_set

    def _sanitize(self) -> None:
        super()._sanitize()
        for node in self._dead_nodes:
            self._died(repr(node))
        state = self._state
        if state.wait_list and state.complete and len(state.participants) >= self._settings.max_nodes:
            state.redundancy_list |= state.wait_list
            state.wait_list.clear()
            self.mark_dirty()


class Rendezvous(dynamic.DynamicRendezvousHandler):
    """Where nodes meet; what it gives to ask for more than its base does."""

    _state_holder: _StateHolder
    _waiting: Callable[[str], None]  # is told what this node waits for

    @classmethod
    def of(
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
        """That of the launch `name`, of `nodes` nodes, which must come together within `wait` seconds.

        `keep_alive`: seconds between heartbeats, and how many are missing of a node that is dead; `died` is told of it, by
        `member`, on a node that has noticed. Spares wait for ever. `waiting` is told, often, what this node waits for.
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

    def next_rendezvous(self) -> RendezvousInfo:
        self._shared_tcp_store_server = self._bootstrap_store_info = None  # those of the world before
        self._state_holder.seen = self._tell
        try:
            return super().next_rendezvous()
        finally:
            self._state_holder.seen = None

    def _tell(self, state: dynamic._RendezvousState) -> None:
        """What this node waits for, which looks for a place."""
        here, places = len(state.participants), self._settings.max_nodes
        if state.closed or (state.complete and self._this_node in state.participants):
            return
        if not state.complete:
            self._waiting(f"nodes: {here} of {places} have come")
        elif here >= places:
            self._waiting(f"a place, as a spare: all {places} are taken")
        else:
            self._waiting(f"{here} of {places} nodes to stop their ranks, so that all start anew")

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return serve(master_port, master_addr)

    @property
    def member(self) -> str:
        """What this node is called in the rendezvous."""
        return repr(self._this_node)

    def num_nodes_waiting(self) -> int:
        waiting = super().num_nodes_waiting()
        return 0 if len(self._state_holder.state.participants) >= self._settings.max_nodes else waiting

    def present(self) -> set[str]:
        """All nodes, by `member`, so far as is known; it asks nobody."""
        state = self._state_holder.state
        return {repr(node) for node in (*state.participants, *state.wait_list, *state.redundancy_list)}

    def spares(self) -> int:
        """Nodes that are left over, so far as is known.

        Those that wait are not all spares: a node that has lost another one waits, too, until the world is made anew.
        """
        return max(0, len(self.present()) - self._settings.max_nodes)

    def leave(self) -> None:
        """Give up this node's place, which leaves the rendezvous open."""
        self._stop_heartbeats()
        self._op_executor.run(dynamic._RendezvousExitOp(), time.monotonic() + _LEAVING)


class Agent(LocalElasticAgent):
    """Starts and watches the ranks of one node, together with the agents of the others.

    `joined` is told of every new world before its ranks start: its number, this node's place among how many, the store.
    `failed` is told of its own ranks that have ended, and says what to do; `say` is told what the agent does by
    itself. `logs` is a folder for what TorchElastic writes of them.
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
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says we say
        told_torch_elastic()
        super().__init__(spec, DefaultLogsSpecs(str(logs)), exit_barrier_timeout=60)
        self._shutdown_timeout = SAVING  # what torch 2.13 calls `_shutdown` with; 2.11 gives it none

    def until_the_end(self) -> Do | Exit | None:
        """Run until the job is done (None), this node has left or stopped, or a signal has ended it (an `Exit`)."""
        try:
            self._outcome: Do | Exit | None = None
            self.run()
            return self._outcome
        except RendezvousClosedError:
            self._say("is not needed any more: the launch has ended")
            return None  # a spare that was never used, or used no more
        except SignalException as error:  # the ranks have had the signal too, and have saved what they could
            self._say(f"ends, as it was sent {error.sigval.name}; its ranks have finished their step and saved")
            return Exit(128 + error.sigval)
        finally:  # a thread that still uses the store when Python ends aborts the process
            self.rendezvous._stop_heartbeats()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SAVING) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """They wait in a collective for ranks that are gone, and would for as long as those that are told to end."""
        self._shutdown(timeout=_LAST_WORDS)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        state = self.rendezvous._state_holder.state
        store = worker_group.store
        assert store is not None
        assert worker_group.group_rank is not None
        self._joined(state.round, worker_group.group_rank, len(state.participants), store)

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                self._say("has come to the end: waits for the other nodes' ranks to do so")
                self._exit_barrier()
                self.rendezvous.shutdown()  # lets the spares go
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
                self._say("stops its ranks: another node is lost or has stopped its own")
                self._restart_workers(group)
