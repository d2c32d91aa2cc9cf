"""Runs a schedule on the ranks of a pipeline: computations as callables, messages between them as tuples of tensors.

Transfers never block: a send goes on its way while later actions are computed, and a receive is posted one computation
ahead of the one that needs it, so that a message arrives while something else is computed.
"""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from optimus.comm import Finish, Group
from optimus.pipeline.schedule import Action, Kind, Schedule

Message = tuple[Tensor, ...]


class Work(Protocol):
    """What a rank computes for its stages. None stands for what the first stage gets and the last one gives."""

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        """The stage's output for the next one."""

    def backward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        """From the gradient of the output to that of the input; adds the gradients of the weights."""

    def room(self) -> Message:
        """Empty tensors for what a receive brings."""


class Happened(NamedTuple):
    """A computation as it was; seconds of `time.perf_counter`."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


class ScheduledExecutor:
    """Runs the actions of this rank of `group`, whose ranks are those of `schedule`, in order.

    Backward passes are in one piece.
    """

    def __init__(self, schedule: Schedule, group: Group, work: Work) -> None:
        self.schedule, self._group, self._work = schedule, group, work
        self._actions = schedule.actions[group.rank]
        self._here: dict[Action, Message | None] = {}  # by computation: what it gave, for one on the same rank
        self._coming: dict[Action, tuple[Message, list[Finish]]] = {}  # by receive
        self._leaving: list[tuple[Message, list[Finish]]] = []  # what is sent must stay until it is there

    def run(self) -> list[Happened]:
        """All actions of a step. Raises `CollectiveError`, which names action and peer, when another rank is lost."""
        happened = []
        posts = self._posts()
        for action in self._actions:
            if action.kind.computes:
                for receive in next(posts):
                    self._post(receive)
                start = time.perf_counter()
                self._compute(action)
                happened.append(Happened(*action, start, time.perf_counter()))
            elif action.kind.sends:
                self._send(action)
        for _, finishes in self._leaving:
            for finish in finishes:
                finish()
        self._leaving.clear()
        self._here.clear()  # what ends here: the loss, and the gradient of what is no parameter
        return happened

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

    def _post(self, receive: Action) -> None:
        message = self._work.room()
        peer = self.schedule.peer(receive)
        self._coming[receive] = (
            message,
            [
                self._group.start_receive(tensor, peer, f"{receive} from rank {self._group.ranks[peer]}")
                for tensor in message
            ],
        )

    def _send(self, send: Action) -> None:
        kind = Kind.FORWARD if send.kind is Kind.SEND_FORWARD else Kind.BACKWARD
        message = self._here.pop(Action(kind, send.stage, send.microbatch))
        assert message is not None
        peer = self.schedule.peer(send)
        where = f"{send} to rank {self._group.ranks[peer]}"
        self._leaving.append((message, [self._group.start_send(tensor, peer, where) for tensor in message]))

    def _compute(self, action: Action) -> None:
        kind, stage, microbatch = action
        compute = self._work.forward if kind is Kind.FORWARD else self._work.backward
        self._here[action] = compute(stage, microbatch, self._input(action))

    def _input(self, action: Action) -> Message | None:
        receive = self.schedule.receive_for(action)
        if receive is not None:
            message, finishes = self._coming.pop(receive)
            for finish in finishes:
                finish()
            return message
        source = self.schedule.input_of(action)
        if source is None or source.stage == action.stage:  # the first forward pass; the last stage's backward pass
            return None
        return self._here.pop(source)
