"""Runs a pipeline without a fixed order: each rank chooses among the computations whose input has arrived.

The method is from the dissertation on AxoNN (chapter 3, algorithm 2). In each step, one thread per stage and direction
receives the messages from other ranks.
"""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import torch

from optimus.comm import Group
from optimus.pipeline.background import own_stream
from optimus.pipeline.executor import Executed, Message, StageLinks, StageRunner, StageWork
from optimus.pipeline.ready import ReadyQueue
from optimus.pipeline.schedule import Action, Kind, Schedule

_KINDS = (Kind.FORWARD, Kind.BACKWARD)


class MessageDrivenExecutor:
    """Runs the computations of this rank in a step. `schedule` maps stages to ranks, and needs no actions.

    See `ReadyQueue` for `caps`. `team` is the group of ranks that share this rank's stages.
    """

    def __init__(
        self,
        schedule: Schedule,
        links: StageLinks,
        work: StageWork,
        *,
        caps: int | Sequence[int] | None,
        team: Group,
        device: torch.device,
    ) -> None:
        self._schedule, self._links, self._work, self._team, self._device = schedule, links, work, team, device
        self._computing = StageRunner(schedule, work)
        self._ready = ReadyQueue(schedule, links.rank, caps, "forward")
        self._queue: SimpleQueue[tuple[Action, Message | Exception]] = SimpleQueue()
        self._messages: dict[Action, Message] = {}

    def run(self) -> list[Executed]:
        """Runs all computations of a step and returns the trace."""
        stages = self._schedule.stages_of(self._links.rank)
        for first in (Action(kind, stage, 0) for stage in stages for kind in _KINDS):
            if self._schedule.receive_for(first) is not None:
                name = f"receives {first}"
                threading.Thread(target=self._receive_all, args=(first,), daemon=True, name=name).start()
        for _ in range(2 * len(stages) * self._schedule.microbatches):
            action = self._next()
            self._computing.run(action, self._messages.pop(action, None))
            following = self._ready.end(action)
            send = self._schedule.send_of(action)
            if send is not None:
                self._links.send(send, self._computing.made.pop(action))
            elif following is not None:
                self._ready.arrive(following, time.perf_counter())
        self._links.finish()
        return self._computing.trace

    def _next(self) -> Action:
        while not self._queue.empty():
            self._take_in()
        if self._team.rank:
            return self._as_chosen()
        while (action := self._ready.choose()) is None:
            self._take_in()
        if self._team.size > 1:
            chosen = torch.tensor([_KINDS.index(action.kind), action.stage, action.microbatch], device=self._device)
            self._team.broadcast(chosen)
        return action

    def _as_chosen(self) -> Action:
        chosen = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._team.broadcast(chosen)
        kind, stage, microbatch = chosen.tolist()
        action = Action(_KINDS[kind], stage, microbatch)
        while not self._ready.has(action):
            self._take_in()
        self._ready.begin(action)
        return action

    def _take_in(self) -> None:
        """Waits for the next message and adds its action to the ready queue. Raises the error of a failed receive."""
        with self._links.waiting():
            action, message = self._queue.get()
        if isinstance(message, Exception):
            raise message
        if self._device.type != "cpu":
            for tensor in message:  # the allocator must not reuse the memory too early
                tensor.record_stream(torch.accelerator.current_stream(self._device))
        self._messages[action] = message
        self._ready.arrive(action, time.perf_counter())

    def _receive_all(self, first: Action) -> None:
        stream, settle = own_stream(self._device)
        with stream:
            for microbatch in range(self._schedule.microbatches):
                action = first._replace(microbatch=microbatch)
                receive = self._schedule.receive_for(action)
                assert receive is not None
                try:
                    message = self._links.start_receive(receive, self._work.receive_buffer(microbatch)).wait()
                    settle()
                except Exception as error:  # without this error in the queue, `_take_in` would wait for ever
                    self._queue.put((action, error))
                    return
                self._queue.put((action, message))
