"""Runs a schedule on the ranks of a pipeline: computations are callables, and messages are tuples of tensors.

Transfers never block: a send proceeds while later actions are computed. A receive is posted one computation ahead of the one
that needs it, so that a message arrives while something else is computed.
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
    """The computations of a rank's stages in forward passes alone.

    None stands for the input of the first stage and the output of the last.
    """

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        """Returns the stage's output for the next stage."""

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        """Runs one pass with this rank's shard of the vocabulary."""

    def room(self, microbatch: int) -> Message:
        """Returns empty tensors for the content of a receive of this microbatch."""


class StageWork(ForwardWork, Protocol):
    """The computations of a rank's stages in forward and backward passes."""

    def backward(self, stage: int, microbatch: int, received: Message | None, defer: bool) -> Message | None:
        """Returns the input gradient, given the output gradient; adds the weight gradients, unless `defer` postpones
        them."""

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """Adds the weight gradients that a backward pass has deferred."""


class Executed(NamedTuple):
    """An action that was executed; times are seconds of `time.perf_counter`."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


class StageLinks:
    """Transfers messages between the ranks of a pipeline.

    Every stage has two of the `streams`: one for messages from the stage before it, one for messages from the next.
    Therefore the order of messages matters only between two stages, and no receive waits for a send.
    """

    def __init__(self, schedule: Schedule, streams: Sequence[Group]) -> None:
        assert len(streams) == 2 * schedule.stages
        self.rank = streams[0].rank
        self._schedule, self._streams = schedule, streams
        self._leaving: deque[tuple[Message, list[Handle]]] = deque()

    def send(self, send: Action, message: Message) -> None:
        """Begins to send `message` and holds it until it has arrived. A limited number of sends per stage may be running."""
        stream, peer = self._stream(partner(send)), self._schedule.peer(send)
        where = f"{send} to rank {stream.ranks[peer]}"
        self._leaving.append((message, [stream.send_async(tensor, peer, where) for tensor in message]))
        self.finish(but=2 * self._schedule.stages)

    def start_receive(self, receive: Action, room: Message) -> Result[Message]:
        """Begins to receive into `room`, which the result returns."""
        stream, peer = self._stream(receive), self._schedule.peer(receive)
        where = f"{receive} from rank {stream.ranks[peer]}"
        handles = [stream.recv_async(tensor, peer, where) for tensor in room]

        def wait() -> Message:
            for handle in handles:
                handle.wait()
            return room

        return Result(wait)

    def waiting(self) -> AbstractContextManager[None]:
        """Encloses a wait for whichever message comes first."""
        return self._streams[0].waiting("receive of a message")

    def finish(self, but: int = 0) -> None:
        """Waits until all sent messages have arrived, except the last `but` messages."""
        while len(self._leaving) > but:
            for handle in self._leaving.popleft()[1]:
                handle.wait()

    def _stream(self, receive: Action) -> Group:
        return self._streams[2 * receive.stage + (receive.kind is Kind.RECEIVE_BACKWARD)]


def links_of(schedule: Schedule) -> list[tuple[int, tuple[int, int]]]:
    """Returns the links that carry messages of a step, in one order on all ranks.

    Each link is (index among the streams of `StageLinks`, (sending rank, receiving rank)).
    """
    borders = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
    found = [(2 * after, before, after) for before, after in borders]
    found += [(2 * before + 1, after, before) for before, after in borders]
    ranks = [(stream, (schedule.rank_of(source), schedule.rank_of(target))) for stream, source, target in found]
    return [(stream, (source, target)) for stream, (source, target) in sorted(ranks) if source != target]


class StageRunner:
    """Runs the computations of one rank in a step, in the caller's order, and hands results over between stages of the rank.

    If the schedule has backward passes, `work` must be a `StageWork`.
    """

    def __init__(self, schedule: Schedule, work: ForwardWork) -> None:
        self.schedule, self._work = schedule, work
        self.trace: list[Executed] = []
        self.made: dict[Action, Message] = {}  # results for other stages, by computation

    def run(self, action: Action, received: Message | None) -> None:
        """Runs `action`; `received` is the message that a receive has brought for the action, if it needs one."""
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
        self._computing = StageRunner(schedule, work)
        self._coming: dict[Action, Result[Message]] = {}  # by receive

    def run(self) -> list[Executed]:
        """Runs all actions of a step. Raises `CollectiveError`, which names action and peer, when another rank is lost."""
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
        """Yields for each computation the receives to post before it: those that come before the next computation."""
        waves: list[list[Action]] = [[]]
        for action in self._actions:
            if action.kind.computes:
                waves.append([])
            elif not action.kind.sends:
                waves[-1].append(action)
        yield [*waves[0], *waves[1]]
        yield from waves[2:]
