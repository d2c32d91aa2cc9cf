"""Runs a schedule on the ranks of a pipeline: computations as callables, messages between them as tuples of tensors.

Transfers never block: a send goes on its way while later actions are computed, and a receive is posted one computation
ahead of the one that needs it, so that a message arrives while something else is computed.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from optimus.comm import Group, Handle, Result
from optimus.pipeline.schedule import Action, Kind, Schedule, partner
from optimus.step_context import region

Message = tuple[Tensor, ...]


class ForwardWork(Protocol):
    """What a rank computes for its stages in forward passes alone. None stands for what the first stage gets and
    the last one gives."""

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        """The stage's output for the next one."""

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        """What this rank does with its part of the vocabulary."""

    def room(self, microbatch: int) -> Message:
        """Empty tensors for what a receive brings of a microbatch."""


class StageWork(ForwardWork, Protocol):
    """What a rank computes for its stages."""

    def backward(self, stage: int, microbatch: int, received: Message | None, defer: bool) -> Message | None:
        """From the gradient of the output to that of the input; adds the gradients of the weights, unless to `defer` it."""

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """Adds the gradients of the weights that a backward pass has deferred."""


class Executed(NamedTuple):
    """An action that was executed; seconds of `time.perf_counter`."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


class StageLinks:
    """Messages between the ranks of a pipeline.

    Of `streams` (two per stage), every stage has one for what it gets from the stage before it and one for what it gets from
    the next. So the order of messages matters only between two stages, and no receive waits for a send.
    """

    def __init__(self, schedule: Schedule, streams: Sequence[Group]) -> None:
        assert len(streams) == 2 * schedule.stages
        self.rank = streams[0].rank
        self._schedule, self._streams = schedule, streams
        self._leaving: deque[tuple[Message, list[Handle]]] = deque()

    def send(self, send: Action, message: Message) -> None:
        """Begin to send; the message is held until it is there. At most some per stage are under way."""
        stream, peer = self._stream(partner(send)), self._schedule.peer(send)
        where = f"{send} to rank {stream.ranks[peer]}"
        self._leaving.append((message, [stream.send_async(tensor, peer, where) for tensor in message]))
        self.finish(but=2 * self._schedule.stages)

    def start_receive(self, receive: Action, room: Message) -> Result[Message]:
        """Begin to receive into `room`, which the result gives."""
        stream, peer = self._stream(receive), self._schedule.peer(receive)
        where = f"{receive} from rank {stream.ranks[peer]}"
        handles = [stream.recv_async(tensor, peer, where) for tensor in room]

        def wait() -> Message:
            for handle in handles:
                handle.wait()
            return room

        return Result(wait)

    def waiting(self) -> AbstractContextManager[None]:
        """Whichever message comes first is waited for inside the context."""
        return self._streams[0].waiting("receive of a message")

    def finish(self, but: int = 0) -> None:
        """Wait until all that was sent is there, but for so many of the last messages."""
        while len(self._leaving) > but:
            for handle in self._leaving.popleft()[1]:
                handle.wait()

    def _stream(self, receive: Action) -> Group:
        return self._streams[2 * receive.stage + (receive.kind is Kind.RECEIVE_BACKWARD)]


def links_of(schedule: Schedule) -> list[tuple[int, tuple[int, int]]]:
    """The links that messages of a step take, in one order on all ranks: (number among the streams of `StageLinks`, (rank
    that sends, rank that receives))."""
    borders = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
    found = [(2 * after, before, after) for before, after in borders]
    found += [(2 * before + 1, after, before) for before, after in borders]
    ranks = [(stream, (schedule.rank_of(source), schedule.rank_of(target))) for stream, source, target in found]
    return [(stream, (source, target)) for stream, (source, target) in sorted(ranks) if source != target]


class Computing:
    """The computations of one rank in a step, whoever decides their order; and what is handed over on the rank itself.

    Where there are backward passes, `work` must be a `StageWork`.
    """

    def __init__(self, schedule: Schedule, work: ForwardWork) -> None:
        self.schedule, self._work = schedule, work
        self.trace: list[Executed] = []
        self.made: dict[Action, Message] = {}  # by computation: what it gave, for another stage

    def run(self, action: Action, received: Message | None) -> None:
        """Do it; `received` is what a receive has brought for it, if it needs one."""
        kind, stage, microbatch = action
        source = self.schedule.input_of(action)
        if received is None and source is not None and source.stage != stage:
            received = self.made.pop(source)
        start = time.perf_counter()
        made = None
        with region(lambda: f"{kind} of stage {stage}, microbatch {microbatch}"):
            if kind is Kind.FORWARD:
                made = self._work.forward(stage, microbatch, received)
            elif kind.of_vocabulary:
                self._work.vocabulary(kind, microbatch)
            elif kind is Kind.BACKWARD_WEIGHTS:
                cast(StageWork, self._work).backward_weights(stage, microbatch)
            else:
                made = cast(StageWork, self._work).backward(stage, microbatch, received, kind is Kind.BACKWARD_INPUT)
        self.trace.append(Executed(*action, start, time.perf_counter()))
        if made is not None:
            self.made[action] = made


class ScheduledExecutor:
    """Runs the actions of this rank of `schedule` in their order."""

    def __init__(self, schedule: Schedule, links: StageLinks, work: ForwardWork) -> None:
        self._actions = schedule.actions[links.rank]
        self._schedule, self._links, self._work = schedule, links, work
        self._computing = Computing(schedule, work)
        self._coming: dict[Action, Result[Message]] = {}  # by receive

    def run(self) -> list[Executed]:
        """All actions of a step. Raises `CollectiveError`, which names action and peer, when another rank is lost."""
        posts = self._posts()
        for action in self._actions:
            if action.kind.computes:
                for receive in next(posts):
                    self._coming[receive] = self._links.start_receive(receive, self._work.room(receive.microbatch))
                needed = self._schedule.receive_for(action)
                self._computing.run(action, None if needed is None else self._coming.pop(needed).wait())
            elif action.kind.sends:
                self._links.send(action, self._computing.made.pop(self._schedule.made_for(action)))
        self._links.finish()
        return self._computing.trace

    def _posts(self) -> Iterator[Sequence[Action]]:
        """For each computation the receives to post before it: those that come before the next one."""
        waves: list[list[Action]] = [[]]
        for action in self._actions:
            if action.kind.computes:
                waves.append([])
            elif not action.kind.sends:
                waves[-1].append(action)
        yield [*waves[0], *waves[1]]
        yield from waves[2:]
