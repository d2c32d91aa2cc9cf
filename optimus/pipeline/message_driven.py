"""A pipeline whose ranks do what has arrived (AxoNN, chapter 3, algorithm 2).

Every stage's receives, from the stage before it and from the next, are posted by a thread of their own, which waits for each
message in turn: Gloo tells of an arrival to nobody but who waits for it, and on an accelerator a wait on a stream of the
thread's own does the same. So messages are there as soon as they can be, and whichever came decides what is computed.

Ranks that share a stage must do the same, since they meet in collectives: the first of them chooses for all.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue

import torch

from optimus.comm import Group
from optimus.errors import UserError
from optimus.pipeline.executor import Computing, Executed, Message, StageLinks, StageWork
from optimus.pipeline.ready import Ready
from optimus.pipeline.schedule import Action, Kind, Schedule

_KINDS = (Kind.FORWARD, Kind.BACKWARD)


class MessageDrivenExecutor:
    """Runs a step of `schedule`, which says where the stages are, and nothing else.

    `caps` as for `Ready`; `team` are the ranks that share this one's stages.
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
        self._computing = Computing(schedule, work)
        self._ready = Ready(schedule, links.rank, caps, "forward")
        self._queue: SimpleQueue[tuple[Action, Message | Exception]] = SimpleQueue()  # what has arrived
        self._messages: dict[Action, Message] = {}

    def run(self) -> list[Executed]:
        """All computations of a step. Raises `CollectiveError`, which names action and peer, when another rank is lost."""
        stages = self._schedule.stages_of(self._links.rank)
        for first in (Action(kind, stage, 0) for stage in stages for kind in _KINDS):
            if self._schedule.receive_for(first) is not None:  # a thread for all that a stage receives from one side
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
        """What to do now, as the first rank of the team chooses; waits for it."""
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
        """Wait for the next arrival."""
        with self._links.waiting():
            action, message = self._queue.get()
        if isinstance(message, Exception):
            raise message
        if self._device.type != "cpu":
            for tensor in message:  # the stream on which it came must not take its memory back too early
                tensor.record_stream(torch.accelerator.current_stream(self._device))
        self._messages[action] = message
        self._ready.arrive(action, time.perf_counter())

    def _receive_all(self, first: Action) -> None:
        stream, settle = _own_stream(self._device)
        with stream:
            for microbatch in range(self._schedule.microbatches):
                action = first._replace(microbatch=microbatch)
                receive = self._schedule.receive_for(action)
                assert receive is not None
                try:
                    message = self._links.start_receive(receive, self._work.room(microbatch)).wait()
                    settle()
                except (UserError, RuntimeError) as error:
                    self._queue.put((action, error))
                    return
                self._queue.put((action, message))


def _own_stream(device: torch.device) -> tuple[nullcontext[None] | torch.Stream, Callable[[], None]]:
    """A stream for this thread, and what waits for all that was given to it."""
    if device.type == "cpu":
        return nullcontext(), lambda: None
    torch.accelerator.set_device_index(device.index or 0)  # each thread has its own
    stream = torch.Stream(device)
    return stream, stream.synchronize
