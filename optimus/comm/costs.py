"""What a collective takes, by events: a message waits for its sender, for its adapter, for the link and for its receiver.

A rank is busy for `overhead` seconds with each message, on each side. Messages leave through the sender's adapter one after
the other, begin to come a latency later, and come in through the receiver's adapter one after the other; on a node every
rank has a link of its own. A rank begins a round when it has all of the last one. All our schedules look the same from every
node, so that the ranks of one stand for all.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from optimus.comm.algorithms import OWN, CollectiveKind, Measured, pieces, rounds, used
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Round, Shape


class Step(NamedTuple):
    """A rank begins to send all of these messages, and then waits for those."""

    sends: tuple[tuple[int, float], ...]
    """(receiver, bytes)"""
    receives: tuple[int, ...]
    """Senders; messages between two ranks come in the order in which they are sent."""


@lru_cache(maxsize=4096)
def seconds(
    algorithm: str, kind: CollectiveKind, shape: Shape, size: float, links: Links | None = None, pieces: int = 1
) -> float:
    """Of a collective of `size` bytes in a group alone on its links; see `algorithms` for the sizes.

    The tensor goes in so many equal `pieces`: all begin their first round in order, and then each its next one as soon as
    the rank has come to it. The backend's own collectives are Gloo's.
    """
    block = size / shape.ranks / pieces
    each = [program(_rounds(algorithm, kind, place, shape), block, pieces) for place in range(shape.per)]
    return max(simulate(each, shape, links or Links()), default=0.0)


def expected(kind: CollectiveKind, shape: Shape, size: float, measured: Measured | None = None) -> float:
    """Seconds by the algorithm that a group over Gloo uses: as it was measured, else by events over links of no machine."""
    if shape.ranks == 1:
        return 0.0
    name = used(kind, shape, size, measured, by_messages=True)
    curves = measured.curves(kind, shape) if measured else {}
    return (
        curves[name].at(size) if name in curves else seconds(name, kind, shape, size, None, pieces(name, shape, size))
    )


def bytes_leaving_node(algorithm: str, kind: CollectiveKind, shape: Shape, size: float) -> float:
    """Of all ranks of a node, to other nodes."""
    block = size / shape.ranks
    return sum(
        len(message.blocks) * block
        for place in range(shape.per)
        for each in _rounds(algorithm, kind, place, shape)
        for message in each.sends
        if message.peer >= shape.per
    )


def _rounds(algorithm: str, kind: CollectiveKind, rank: int, shape: Shape) -> tuple[Round, ...]:
    """Gloo's own are rings, of which that of a reduce-scatter is a whole all-reduce, but for its all-to-all."""
    if algorithm != OWN:
        return rounds(algorithm, kind, rank, shape)
    if kind == "all_to_all":
        return rounds("direct", kind, rank, shape)
    return rounds("ring", "all_reduce" if kind == "reduce_scatter" else kind, rank, shape)


def program(schedule: Sequence[Round], block: float, pieces: int = 1) -> list[Step]:
    """What a rank does, with blocks of so many bytes in each piece."""
    if not schedule:
        return []
    sends = [tuple((peer, len(blocks) * block) for peer, blocks in each.sends) for each in schedule]
    receives = [tuple(peer for peer, _ in each.receives) for each in schedule]
    first, *others = [now for now in receives for _ in range(pieces)]
    return [
        Step(sends[0] * pieces, first),
        *(Step(following, now) for following, now in zip([each for each in sends[1:] for _ in range(pieces)], others)),
        *(Step((), now) for now in others[(len(schedule) - 1) * pieces :]),
    ]


def simulate(programs: Sequence[Sequence[Step]], shape: Shape, links: Links) -> list[float]:
    """When each rank has done its program, in seconds: all ranks of the group, or those of the first node for all others.

    Messages that come to a queue at the same moment are served nearest first, so that nodes do not differ.
    Raises `ValueError` where a rank waits for what nobody sends.
    """
    return _Simulation(programs, shape, links).run()


class _Rank:
    """Where a rank is in its program."""

    def __init__(self, program: Sequence[Step]) -> None:
        self.steps = iter(program)
        self.now = 0.0
        self.awaited: list[tuple[int, int]] = []  # (sender, number of its message to this rank)
        self.missing: set[tuple[int, int]] = set()
        self.number: defaultdict[int, int] = defaultdict(int)  # of the next awaited message, by sender
        self.come: defaultdict[int, list[float]] = defaultdict(list)  # when a sender's messages were there

    def send(self, overhead: float) -> float:
        """When the next message is on its way."""
        self.now += overhead
        return self.now

    def wait(self, senders: Sequence[int]) -> None:
        """For the next message of each."""
        self.awaited = []
        for sender in senders:
            self.awaited.append((sender, self.number[sender]))
            self.number[sender] += 1
        self.missing = {(sender, number) for sender, number in self.awaited if number >= len(self.come[sender])}

    def receive(self, overhead: float) -> None:
        """What is awaited, all of which has come."""
        for moment in sorted(self.come[sender][number] for sender, number in self.awaited):
            self.now = max(self.now, moment) + overhead


class _Simulation:
    """Of all ranks, or of those of one node: then what leaves for another node stands for what comes from one as far on the
    other side."""

    def __init__(self, programs: Sequence[Sequence[Step]], shape: Shape, links: Links) -> None:
        self._ranks = [_Rank(program) for program in programs]
        self._shape, self._links = shape, links
        self._events: list[tuple[float, int, int, bool, int, int, int, float]] = []
        self._count = count()
        self._out: defaultdict[int, float] = defaultdict(float)  # when a queue is free
        self._in: defaultdict[int, float] = defaultdict(float)

    def run(self) -> list[float]:
        for rank in range(len(self._ranks)):
            self._go_on(rank)
        while self._events:
            moment, _, _, comes, _, sender, target, size = heappop(self._events)
            (self._come if comes else self._leave)(moment, sender, target, size)
        stuck = [number for number, rank in enumerate(self._ranks) if rank.missing]
        if stuck:
            raise ValueError(f"ranks {stuck} wait for what nobody sends")
        return [rank.now for rank in self._ranks]

    def _go_on(self, number: int) -> None:
        """With a rank's program, until it waits for what has not come."""
        rank = self._ranks[number]
        for sends, receives in rank.steps:
            for target, size in sends:
                self._push_event(rank.send(self._links.overhead), False, number, target, size)
            rank.wait(receives)
            if rank.missing:
                return
            rank.receive(self._links.overhead)

    def _push_event(self, moment: float, comes: bool, sender: int, target: int, size: float) -> None:
        """What is at one moment is in the order of (distance, place of the target): alike on all nodes."""
        nodes, per = self._shape
        event = (
            moment,
            (target - sender) % (nodes * per),
            target % per,
            comes,
            next(self._count),
            sender,
            target,
            size,
        )
        heappush(self._events, event)

    def _leave(self, moment: float, sender: int, target: int, size: float) -> None:
        link, queue = self._way(sender, target, sender)
        begin = max(moment, self._out[queue])
        self._out[queue] = begin + size / link.bandwidth
        self._push_event(begin + link.latency, True, sender, target, size)

    def _come(self, moment: float, sender: int, target: int, size: float) -> None:
        number = target % len(self._ranks)
        link, queue = self._way(sender, target, number)
        self._in[queue] = max(moment, self._in[queue]) + size / link.bandwidth
        rank, seen = self._ranks[number], (sender - target + number) % self._shape.ranks
        message = (seen, len(rank.come[seen]))
        rank.come[seen].append(self._in[queue])
        if message in rank.missing:
            rank.missing.remove(message)
            if not rank.missing:
                rank.receive(self._links.overhead)
                self._go_on(number)

    def _way(self, sender: int, target: int, end: int) -> tuple[Link, int]:
        """The link, and the queue at one of its ends: of an adapter, or, below zero, of a rank on its node."""
        node, place = divmod(end, self._shape.per)
        if sender // self._shape.per == target // self._shape.per:
            return self._links.inside, -1 - end
        return self._links.between, node * self._links.adapters + self._links.adapter(place, self._shape.per)
