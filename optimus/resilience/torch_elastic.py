"""All that is used of TorchElastic's private parts, and why. `tests/resilience/test_torch_elastic.py` says when it changes.

torchrun of torch 2.13 falls short of spare nodes in five ways, each mended here:

1. Its shared store: a survivor that stays rank 0 does not tell the others its address again. Sharing is switched off.
2. A spare that waits makes a full world restart for ever. No node counts as waiting while the world is full.
3. A spare that was never used ends with an error when the job is done. A closed rendezvous is its end.
4. An agent that fails closes the rendezvous for everybody. Here a node that leaves just leaves.
5. A spare that goes for a free place and comes too late stays on the list of those that wait for the next round, whose time
   runs out. While the world is full, it is a spare again.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _RendezvousExitOp,
)

from optimus.resilience.policy import Do

_LAST_WORDS = 2  # seconds that ranks have to end by themselves
_SAVING = 100  # seconds that ranks have to end their step and save, when the launcher itself is told to end


@dataclass(frozen=True)
class World:
    """The nodes that have come together; `rank` is this one's place among them."""

    round: int
    rank: int
    size: int


class _StateHolder(_BackendRendezvousStateHolder):
    """Tells of nodes that are taken out because they are silent; once that is written, no other node sees it. And whoever
    waits while the world is full is a spare."""

    def __init__(
        self, backend: C10dRendezvousBackend, settings: RendezvousSettings, died: Callable[[str], None]
    ) -> None:
        super().__init__(backend, settings)
        self._died = died

    def _sanitize(self) -> None:
        super()._sanitize()
        for node in self._dead_nodes:
            self._died(repr(node))
        state = self._state
        if state.wait_list and state.complete and len(state.participants) >= self._settings.max_nodes:
            state.redundancy_list |= state.wait_list
            state.wait_list.clear()
            self.mark_dirty()


class Rendezvous(DynamicRendezvousHandler):
    """Where nodes meet; what it gives to ask for more than its base does."""

    @classmethod
    def of(
        cls,
        store: Store,
        name: str,
        nodes: int,
        address: str,
        *,
        interval: int,
        attempts: int,
        wait: float,
        died: Callable[[str], None],
    ) -> "Rendezvous":
        """That of the launch `name`, of `nodes` nodes, which must come together within `wait` seconds.

        One that has sent no heartbeat for `attempts` intervals of `interval` seconds is dead; `died` is told of it, by
        `member`, on a node that has noticed. Spares wait for ever.
        """
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch has no other switch for it
        settings = RendezvousSettings(
            name,
            nodes,
            nodes,
            RendezvousTimeout(join=timedelta(seconds=wait), last_call=timedelta(seconds=1)),
            keep_alive_interval=timedelta(seconds=interval),
            keep_alive_max_attempt=attempts,
        )
        backend = C10dRendezvousBackend(store, name)
        holder = _StateHolder(backend, settings, died)
        return cls(cls._node_desc_generator.generate(address), settings, backend.name, store, holder)

    @property
    def member(self) -> str:
        """What this node is called in the rendezvous."""
        return repr(self._this_node)

    def num_nodes_waiting(self) -> int:
        waiting = super().num_nodes_waiting()
        return 0 if len(self._state_holder.state.participants) >= self._settings.max_nodes else waiting

    def spares(self) -> int:
        """Nodes that are left over, so far as is known; it asks nobody.

        Those that wait are not all spares: a node that has lost another one waits, too, until the world is made anew.
        """
        state = self._state_holder.state
        present = len(state.participants) + len(state.wait_list) + len(state.redundancy_list)
        return max(0, present - self._settings.max_nodes)

    def leave(self) -> None:
        """Give up this node's place, which leaves the rendezvous open."""
        self._stop_heartbeats()
        self._op_executor.run(_RendezvousExitOp(), time.monotonic() + 10)


class Agent(LocalElasticAgent):
    """Starts and watches the ranks of one node, together with the agents of the others.

    `joined` is told of every new world before its ranks are started; `failed` of its own ranks that have ended, and says
    what to do.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        command: Sequence[str],
        ranks: int,
        *,
        joined: Callable[[World, Store], None],
        failed: Callable[[dict[int, ProcessFailure]], Do],
    ) -> None:
        self.rendezvous = rendezvous
        self._joined, self._failed = joined, failed
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
        super().__init__(spec, DefaultLogsSpecs(), exit_barrier_timeout=60, shutdown_timeout=_SAVING)

    def until_the_end(self) -> Do | None:
        """Run until the job is done (None), or this node has left or stopped; a signal that ends it makes it leave."""
        try:
            self._outcome: Do | None = None
            self.run()
            return self._outcome
        except RendezvousClosedError:
            return None  # a spare that was never used, or used no more
        except SignalException:
            return Do.LEAVE  # the ranks have had the signal too, and have saved what they could

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """They wait in a collective for ranks that are gone, and would for the 30 s that the base class gives them."""
        self._shutdown(timeout=_LAST_WORDS)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        state = self.rendezvous._state_holder.state
        store = worker_group.store
        assert store is not None
        assert worker_group.group_rank is not None
        self._joined(World(state.round, worker_group.group_rank, len(state.participants)), store)

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                self._exit_barrier()
                self.rendezvous.shutdown()  # lets the spares go
                return result
            if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                self._stop_workers(group)
                self._outcome = self._failed(result.failures)
                if self._outcome is Do.LEAVE:
                    self.rendezvous.leave()
                    return result
                if self._outcome is Do.STOP:
                    self.rendezvous.shutdown()
                    return result
                self._outcome = None
                self._initialize_workers(group)
            elif self.rendezvous.num_nodes_waiting() > 0:
                self._restart_workers(group)  # a place is free: another node is lost or has stopped its ranks
