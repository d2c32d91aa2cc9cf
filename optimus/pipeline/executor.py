"""Runs a schedule on the ranks of a pipeline.

Sends and receives overlap with computations.
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
    """The computations of a rank's stages in forward passes.

    `forward` receives None for the first stage, and returns None for the last stage.
    """

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        """Runs a forward pass and returns the stage's output for the next stage."""

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        """Runs one pass with this rank's shard of the vocabulary."""

    def receive_buffer(self, microbatch: int) -> Message:
        """Returns uninitialised tensors for a received message of this microbatch."""


class StageWork(ForwardWork, Protocol):
    """The computations of a rank's stages in forward and backward passes."""

    def backward(self, stage: int, microbatch: int, received: Message | None, defer: bool) -> Message | None:
        """Runs a backward pass and returns the gradient of the stage's input, or None for the first stage.

        `received` is the gradient of the stage's output, or None for the last stage. With `defer`, `backward_weights`
        adds the weight gradients later.
        """

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """Adds the deferred weight gradients."""


class Executed(NamedTuple):
    """An executed computation, with times in seconds of `time.perf_counter`."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


class StageLinks:
    """Transfers messages between the ranks of a pipeline.

    Stage s receives from the previous stage over the group `streams[2 * s]`, and from the next stage over the group
    `streams[2 * s + 1]`.
    """

    def __init__(self, schedule: Schedule, streams: Sequence[Group]) -> None:
        assert len(streams) == 2 * schedule.stages
        self.rank = streams[0].rank
        self._schedule, self._streams = schedule, streams
        self._sending: deque[tuple[Message, list[Handle]]] = deque()

    def send(self, send: Action, message: Message) -> None:
        """Begins to send `message`; waits for the oldest sends if more than 2 * stages messages are under way."""
        stream, peer = self._stream(partner(send)), self._schedule.peer(send)
        where = f"{send} to rank {stream.ranks[peer]}"
        self._sending.append((message, [stream.send_async(tensor, peer, where) for tensor in message]))
        self.finish(but=2 * self._schedule.stages)

    def start_receive(self, receive: Action, receive_buffer: Message) -> Result[Message]:
        """Begins to receive into `receive_buffer`; the result's `wait` returns `receive_buffer`."""
        stream, peer = self._stream(receive), self._schedule.peer(receive)
        where = f"{receive} from rank {stream.ranks[peer]}"
        handles = [stream.recv_async(tensor, peer, where) for tensor in receive_buffer]

        def wait() -> Message:
            for handle in handles:
                handle.wait()
            return receive_buffer

        return Result(wait)

    def waiting(self) -> AbstractContextManager[None]:
        """Records that this rank waits for a message inside the context."""
        return self._streams[0].waiting("receive of a message")

    def finish(self, but: int = 0) -> None:
        """Waits for the sends of all messages except the last `but` messages."""
        while len(self._sending) > but:
            for handle in self._sending.popleft()[1]:
                handle.wait()

    def _stream(self, receive: Action) -> Group:
        return self._streams[2 * receive.stage + (receive.kind is Kind.RECEIVE_BACKWARD)]


def links_of(schedule: Schedule) -> list[tuple[int, tuple[int, int]]]:
    """Returns the links that carry messages of a step, in the same order on all ranks.

    A link is (index into the streams of `StageLinks`, (sending rank, receiving rank)).
    """
    borders = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
    found = [(2 * after, before, after) for before, after in borders]
    found += [(2 * before + 1, after, before) for before, after in borders]
    ranks = [(stream, (schedule.rank_of(source), schedule.rank_of(target))) for stream, source, target in found]
    return [(stream, (source, target)) for stream, (source, target) in sorted(ranks) if source != target]


class StageRunner:
    """Runs the computations of one rank in a step. For backward passes, `work` must be a `StageWork`."""

    def __init__(self, schedule: Schedule, work: ForwardWork) -> None:
        self.schedule, self._work = schedule, work
        self.trace: list[Executed] = []
        self.made: dict[Action, Message] = {}  # results for other stages

    def run(self, action: Action, received: Message | None) -> None:
        """Runs `action`; `received` is the message from another rank, if any."""
        kind, stage, microbatch = action
        source = self.schedule.input_of(action)
        if received is None and source is not None and source.stage != stage:
            received = self.made.pop(source)
        start = time.perf_counter()
        made = None
        with region(lambda: f"{kind} of stage {stage}, microbatch {microbatch}"):
            if kind is Kind.FORWARD:
                made = self._work.forward(stage, microbatch, received)
            elif kind.is_vocabulary:
                self._work.vocabulary(kind, microbatch)
            elif kind is Kind.BACKWARD_WEIGHTS:
                cast(StageWork, self._work).backward_weights(stage, microbatch)
            else:
                made = cast(StageWork, self._work).backward(stage, microbatch, received, kind is Kind.BACKWARD_INPUT)
        self.trace.append(Executed(*action, start, time.perf_counter()))
        if made is not None:
            self.made[action] = made


class ScheduledExecutor:
    """Runs this rank's actions of `schedule` in order, but posts receives one computation early."""

    def __init__(self, schedule: Schedule, links: StageLinks, work: ForwardWork) -> None:
        self._actions = schedule.actions[links.rank]
        self._schedule, self._links, self._work = schedule, links, work
        self._computing = StageRunner(schedule, work)
        self._coming: dict[Action, Result[Message]] = {}  # posted receives

    def run(self) -> list[Executed]:
        """Runs all actions of a step and returns the trace of the computations."""
        posts = self._posts()
        for action in self._actions:
            if action.kind.computes:
                for receive in next(posts):
                    self._coming[receive] = self._links.start_receive(
                        receive, self._work.receive_buffer(receive.microbatch)
                    )
                needed = self._schedule.receive_for(action)
                self._computing.run(action, None if needed is None else self._coming.pop(needed).wait())
            elif action.kind.sends:
                self._links.send(action, self._computing.made.pop(self._schedule.made_for(action)))
        self._links.finish()
        return self._computing.trace

    def _posts(self) -> Iterator[Sequence[Action]]:
        waves: list[list[Action]] = [[]]
        for action in self._actions:
            if action.kind.computes:
                waves.append([])
            elif not action.kind.sends:
                waves[-1].append(action)
        yield [*waves[0], *waves[1]]
        yield from waves[2:]
